// --- documents in the order of their relevance to a query ---

VIEWS.rerank = { title: "Rerank", task: "rerank", run: rerank };

async function rerank() {
  const [query, documents] = [element("rerank-query").value.trim(), lines("rerank-documents")];
  if (!query || documents.length === 0) throw new Refused(400, "Write a query and at least one document.");
  const answer = await call("v1/rerank", { ...naming(), query, documents });
  const [ofQuery, ...lengths] = await lengthsOf([query, ...documents]);
  const areCut = lengths.length === documents.length ? longest(lengths, answer.cut) : new Set();
  const results = answer.data.results.toSorted((a, b) => b.relevance_score - a.relevance_score);
  const widths = shares(results.map((result) => result.relevance_score));
  drawBars(element("rerank-list"), results.slice(0, MOST).map(({ index, relevance_score: value }, i) => {
    const length = lengths[index] === undefined ? "" : ` · ${count(lengths[index], "token")}`;
    const cut = areCut.has(index) ? `, cut: ${number(info.max_input_length)} with the query` : "";
    return { label: documents[index], value, share: widths[i], note: `document ${index + 1}${length}${cut}` };
  }));
  const said = [ofQuery === undefined ? "" : `The query has ${count(ofQuery, "token")}.`];
  if (answer.cut) said.push(`${number(answer.cut)} of ${count(documents.length, "document")} cut, to ${number(info.max_input_length)} tokens with the query.`);
  if (results.length > MOST) said.push(`The best ${MOST} of ${number(results.length)} are shown.`);
  element("rerank-note").textContent = said.join(" ");
  return { calls: [answer] };
}
