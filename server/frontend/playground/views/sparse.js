// --- the weighted words of a text ---

const MOST_WORDS = 100;

VIEWS.sparse = { title: "Sparse", task: "sparse", run: weigh };

async function weigh() {
  const text = element("sparse-text").value.trim();
  if (!text) throw new Refused(400, "Write a text.");
  const answer = await call(route("embed_sparse"), { inputs: text });
  const all = answer.data[0].toSorted((a, b) => b.value - a.value);
  const shownOnes = all.slice(0, MOST_WORDS);
  const words = await wordsOf(shownOnes.map(({ index }) => index));
  const highest = shownOnes[0]?.value ?? 1;
  drawBars(element("sparse-list"), shownOnes.map(({ index, value }, i) => (
    { label: words[i], value, share: Math.max(0, value / highest), title: `id ${index}` }
  )));
  const [length] = await lengthsOf([text]);
  const said = [lengthText(length, answer.cut > 0, info.max_input_length), count(all.length, "weight")];
  if (all.length > MOST_WORDS) said.push(`the ${MOST_WORDS} highest are shown`);
  element("sparse-note").textContent = said.filter(Boolean).join(", ");
  return { calls: [answer] };
}
