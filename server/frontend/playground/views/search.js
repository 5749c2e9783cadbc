// --- a search: documents in the order of their cosine with a query ---

VIEWS.search = { title: "Search", task: "embed", run: search };

async function search() {
  const [query, documents] = [element("search-query").value.trim(), lines("search-documents")];
  if (!query || documents.length === 0) throw new Refused(400, "Write a query and at least one document.");
  // `input_type` chooses the model's prompt for queries or for documents, where it has one.
  const embed = (input, type) => call("v1/embeddings", { model: info.served_model_name, input, input_type: type });
  const calls = [await embed([query], "query"), await embed(documents, "document")];
  const [[ofQuery], ofDocuments] = calls.map(({ data }) => data.data.map(({ embedding }) => embedding));
  const results = ofDocuments.map((vector, index) => ({ index, value: dot(ofQuery, vector) })).sort((a, b) => b.value - a.value);
  const best = results.slice(0, MOST);
  const lengths = await lengthsOf(documents);
  const areCut = lengths.length === documents.length ? longest(lengths, calls[1].cut) : new Set();
  const widths = shares(best.map(({ value }) => value));
  drawBars(element("search-list"), best.map(({ index, value }, i) => {
    const length = lengthText(lengths[index], areCut.has(index), info.max_input_length);
    return { label: documents[index], value, share: widths[i], note: `document ${index + 1}${length && ` · ${length}`}` };
  }));
  const said = [cutText(calls[1].cut, documents.length, info.max_input_length)];
  if (results.length > MOST) said.push(`The best ${MOST} of ${number(results.length)} are shown.`);
  element("search-note").textContent = said.filter(Boolean).join(" ");
  return { calls };
}
