// --- the labels of a text ---

VIEWS.classify = { title: "Labels", task: "classify", run: classify };

async function classify() {
  const text = element("classify-text").value.trim();
  if (!text) throw new Refused(400, "Write a text.");
  const answer = await call(route("predict"), { inputs: text });
  const labels = answer.data.toSorted((a, b) => b.score - a.score);
  const widths = shares(labels.map((label) => label.score));
  drawBars(element("classify-list"), labels.slice(0, MOST).map(({ label, score: value }, i) => ({ label, value, share: widths[i] })));
  const [length] = await lengthsOf([text]);
  const most = labels.length > MOST ? `, the best ${MOST} of ${number(labels.length)} labels` : "";
  element("classify-note").textContent = lengthText(length, answer.cut > 0, info.max_input_length) + most;
  return { calls: [answer] };
}
