// --- how many tokens texts have, and which of them were cut ---

const MEASURED_TEXTS = 65; // a query, and as many documents as are shown
const MEASURED_CHARACTERS = 500_000;

async function lengthsOf(texts, prompt = "") { // of the first texts; none where that is too much to ask
  const asked = texts.slice(0, MEASURED_TEXTS);
  if (asked.reduce((sum, text) => sum + text.length, 0) > MEASURED_CHARACTERS) return [];
  const body = { inputs: asked };
  if (prompt) body.prompt_name = prompt;
  try {
    return (await (await ask(route("tokenize"), body)).json()).map((tokens) => tokens.length);
  } catch { // the response stands without its lengths
    return [];
  }
}

function longest(lengths, many) { // the indices of the longest: what is cut is longer than what is not
  return new Set(lengths.map((_, i) => i).sort((a, b) => lengths[b] - lengths[a]).slice(0, many));
}

function lengthText(length, cut, limit) {
  if (length === undefined) return "";
  return cut ? `cut to ${number(limit)} of ${count(length, "token")}` : count(length, "token");
}

function cutText(many, all, limit) {
  return many ? `${number(many)} of ${count(all, "text")} ${many === 1 ? "was" : "were"} cut to ${number(limit)} tokens.` : "";
}

// --- tables of numbers: colored, with a line that says what a cell is, for pointers and for the arrow keys ---

const heat = (value) => `${Math.round(100 * Math.min(1, Math.max(0, value)))}%`;
const decimals = (value) => value.toFixed(2).replace("-0.00", "0.00");
const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -Infinity], End: [0, Infinity] };

function drawGrid(table, columns, rows, values, { say, digits = decimals, marked = () => false }) {
  // `columns` and `rows` are header cells (a row may have several), `values` an array a row
  const head = make("tr");
  head.append(...columns);
  const body = values.map((numbers, i) => {
    const row = make("tr");
    row.append(...rows[i]);
    numbers.forEach((value, j) => {
      const cell = make("td", digits(value), { "data-row": i, "data-column": j, tabindex: -1 });
      cell.style.setProperty("--heat", heat(value));
      if (marked(i, j)) cell.className = "best";
      row.append(cell);
    });
    return row;
  });
  const [thead, tbody] = [make("thead"), make("tbody")];
  thead.append(head);
  tbody.append(...body);
  table.replaceChildren(table.caption, thead, tbody);

  let current = tbody.querySelector("[data-row]");
  current.tabIndex = 0;
  const point = (cell) => {
    if (!cell.dataset.row) return;
    current.classList.remove("on");
    current.tabIndex = -1;
    current = cell;
    cell.tabIndex = 0;
    cell.classList.add("on");
    say(Number(cell.dataset.row), Number(cell.dataset.column));
  };
  const nearest = (at, most) => Math.min(most, Math.max(0, at));
  tbody.onpointerover = ({ target }) => point(target);
  tbody.onkeydown = (event) => {
    const step = STEPS[event.key];
    if (!step || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const row = nearest(Number(current.dataset.row) + step[0], values.length - 1);
    const column = nearest(Number(current.dataset.column) + step[1], values[row].length - 1);
    tbody.querySelector(`[data-row="${row}"][data-column="${column}"]`).focus();
  };
  tbody.addEventListener("focusin", ({ target }) => point(target));
}

// --- a list of things with a number each: a bar, and the number ---

const score = (value) => (value === 0 || Math.abs(value) >= 0.001 ? value.toFixed(3) : value.toExponential(1));

function shares(values) { // of the bar's width: the value itself where all are 0 … 1, as probabilities are
  const [low, high] = [Math.min(0, ...values), Math.max(1, ...values)];
  return values.map((value) => (value - low) / (high - low));
}

function drawBars(list, entries) { // { label, value, share, note?, title? }
  list.replaceChildren(...entries.map(({ label, value, share, note = "", title = "" }) => {
    const [entry, name, track, bar] = [make("li"), make("div", "", { class: "name" }), make("div", "", { class: "track", "aria-hidden": true }), make("i")];
    name.append(make("p", short(label, 300), { dir: "auto", title }));
    if (note) name.append(make("p", note, { class: "hint" }));
    bar.style.width = `${100 * share}%`;
    track.append(bar);
    entry.append(name, track, make("data", score(value), { value }));
    return entry;
  }));
}

// --- the words of token ids ---

async function wordsOf(ids) { // an id stands for itself where it has no word
  if (ids.length === 0) return [];
  let words = [];
  try {
    words = await (await ask(route("decode"), { ids: ids.map((id) => [id]), skip_special_tokens: false })).json();
  } catch { /* ids, then */ }
  return ids.map((id, i) => words[i]?.trim() || `#${id}`);
}

// --- the similarity of texts ---

const DENSE = 14; // more texts than this: small cells
const WIDE = 6; // more texts than this: over the whole width
const MOST = 64; // more than this many rows nobody reads
const NAMED = 5; // cut texts that are named each

const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0); // a cosine: the server has normalized them

VIEWS.similarity = { title: "Similarity", task: "embed", run: compare };

async function compare() {
  const texts = lines("texts");
  if (texts.length === 0) throw new Refused(400, "Write at least one text.");
  const [dimensions, prompt] = [Number(element("dimensions").value), element("prompt").value];
  const body = { model: info.served_model_name, input: texts };
  if (dimensions) body.dimensions = dimensions;
  if (prompt) body.prompt_name = prompt;
  const response = await call("v1/embeddings", body);
  const vectors = response.data.data.map(({ embedding }) => embedding);
  const lengths = await lengthsOf(texts.slice(0, MOST), prompt);
  showMatrix(texts, vectors, lengths, response.cut);
  return { calls: [response], python: embeddingsInPython(body), vectors: { texts, rows: vectors } };
}

function showMatrix(allTexts, vectors, lengths, cut) {
  const texts = allTexts.slice(0, MOST);
  const table = element("matrix");
  table.className = texts.length > DENSE ? "dense" : "";
  element("view-similarity").classList.toggle("wide", texts.length > WIDE);
  const titles = texts.map((text, i) => {
    const [title, name] = [make("th", "", { scope: "row", title: short(text, 600) }), make("div", "", { class: "numbered" })];
    name.append(make("span", i + 1), make("bdi", short(text), { dir: "auto" }));
    title.append(name);
    return [title];
  });
  const columns = [make("td"), ...texts.map((text, i) => make("th", i + 1, { scope: "col", title: short(text, 600) }))];
  const values = texts.map((_, i) => texts.map((_, j) => dot(vectors[i], vectors[j])));

  const areCut = allTexts.length > MOST ? new Set() : longest(lengths, cut);
  const length = (i) => lengthText(lengths[i], areCut.has(i), info.max_input_length);
  const say = (i, j, before = "") => {
    const parts = [i, j].map((at) => [quote(texts[at]), length(at) && ` (${length(at)})`]);
    element("pair").replaceChildren(`${before}${values[i][j].toFixed(3)}: `, ...parts[0], " and ", ...parts[1]);
  };
  const digits = texts.length > DENSE ? (value) => decimals(value).replace("0.", ".").replace("1.00", "1") : decimals;
  drawGrid(table, columns, titles, values, { say, digits });

  let best = null;
  values.forEach((row, i) => row.forEach((value, j) => {
    if (i < j && (!best || value > values[best[0]][best[1]])) best = [i, j];
  }));
  element("pair").textContent = texts.length === 1 ? length(0) : "";
  if (best) say(...best, "Closest, ");
  if (allTexts.length > MOST) element("pair").append(` (the first ${MOST} of ${number(allTexts.length)} are shown)`);
  const each = [...areCut].sort((a, b) => a - b).map((i) => `Text ${i + 1} was ${length(i)}.`);
  element("cut").textContent = each.length > 0 && each.length <= NAMED ? each.join(" ") : cutText(cut, allTexts.length, info.max_input_length);
}

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

// --- documents in the order of their relevance to a query ---

element("rerank-documents").value = element("search-documents").value;

VIEWS.rerank = { title: "Rerank", task: "rerank", run: rerank };

async function rerank() {
  const [query, documents] = [element("rerank-query").value.trim(), lines("rerank-documents")];
  if (!query || documents.length === 0) throw new Refused(400, "Write a query and at least one document.");
  const response = await call("v1/rerank", { ...naming(), query, documents });
  const [ofQuery, ...lengths] = await lengthsOf([query, ...documents]);
  const areCut = lengths.length === documents.length ? longest(lengths, response.cut) : new Set();
  const results = response.data.results.toSorted((a, b) => b.relevance_score - a.relevance_score);
  const widths = shares(results.map((result) => result.relevance_score));
  drawBars(element("rerank-list"), results.slice(0, MOST).map(({ index, relevance_score: value }, i) => {
    const length = lengths[index] === undefined ? "" : ` · ${count(lengths[index], "token")}`;
    const cut = areCut.has(index) ? `, cut: ${number(info.max_input_length)} with the query` : "";
    return { label: documents[index], value, share: widths[i], note: `document ${index + 1}${length}${cut}` };
  }));
  const said = [ofQuery === undefined ? "" : `The query has ${count(ofQuery, "token")}.`];
  if (response.cut) said.push(`${number(response.cut)} of ${count(documents.length, "document")} cut, to ${number(info.max_input_length)} tokens with the query.`);
  if (results.length > MOST) said.push(`The best ${MOST} of ${number(results.length)} are shown.`);
  element("rerank-note").textContent = said.join(" ");
  return { calls: [response] };
}

// --- the labels of a text ---

VIEWS.classify = { title: "Labels", task: "classify", run: classify };

async function classify() {
  const text = element("classify-text").value.trim();
  if (!text) throw new Refused(400, "Write a text.");
  const response = await call(route("predict"), { inputs: text });
  const labels = response.data.toSorted((a, b) => b.score - a.score);
  const widths = shares(labels.map((label) => label.score));
  drawBars(element("classify-list"), labels.slice(0, MOST).map(({ label, score: value }, i) => ({ label, value, share: widths[i] })));
  const [length] = await lengthsOf([text]);
  const most = labels.length > MOST ? `, the best ${MOST} of ${number(labels.length)} labels` : "";
  element("classify-note").textContent = lengthText(length, response.cut > 0, info.max_input_length) + most;
  return { calls: [response] };
}

// --- labels of the reader's own ---

VIEWS.zero = { title: "Own labels", task: "zero_shot", run: labelFreely };

async function labelFreely() {
  const [text, labels] = [element("zero-text").value.trim(), lines("zero-labels")];
  if (!text || labels.length === 0) throw new Refused(400, "Write a text and at least one label.");
  const body = { inputs: text, candidate_labels: labels, hypothesis_template: element("zero-template").value, multi_label: element("zero-several").checked };
  const response = await call(route("zero_shot"), body);
  const { labels: names, scores } = response.data;
  drawBars(element("zero-list"), names.slice(0, MOST).map((label, i) => ({ label, value: scores[i], share: scores[i] })));
  const said = [cutText(response.cut, labels.length, info.max_input_length).replace("text", "pair")];
  if (names.length > MOST) said.push(`The best ${MOST} of ${number(names.length)} are shown.`);
  element("zero-note").textContent = said.filter(Boolean).join(" ");
  return { calls: [response] };
}

// --- a question about a text ---

VIEWS.decide = { title: "Decide", task: "decide", run: decide };

async function decide() {
  const [text, instructions, options] = [element("decide-text").value.trim(), element("decide-instructions").value.trim(), lines("decide-options")];
  if (!text || !instructions) throw new Refused(400, "Write a text and a question.");
  const choices = options.map((value) => ({ value }));
  const question = choices.length ? { type: "choice", instructions, choices } : { type: "predicate", instructions };
  const response = await call("v1/decisions", { ...naming(), input: text, questions: [question] });
  const [{ probability: yes, probabilities, confidence }] = response.data.answers;
  const found = probabilities ?? [{ value: "yes", probability: yes }, { value: "no", probability: 1 - yes }];
  drawBars(element("decide-list"), found.slice(0, MOST).map(({ value: label, probability: value }) => ({ label, value, share: value })));
  const said = [cutText(response.cut, 1, info.max_input_length)];
  if (confidence !== undefined) said.push(`Confidence ${score(confidence)}.`);
  if (found.length > MOST) said.push(`The first ${MOST} of ${number(found.length)} are shown.`);
  element("decide-note").textContent = said.filter(Boolean).join(" ");
  return { calls: [response] };
}

// --- the entities of a text, marked in it ---

const HUES = 5; // colors of labels, one after the other

VIEWS.entities = { title: "Entities", task: "token_classify", run: findEntities };

async function findEntities() {
  const text = element("entities-text").value.trim();
  if (!text) throw new Refused(400, "Write a text.");
  const body = { inputs: text, aggregation_strategy: element("entities-strategy").value };
  const response = await call(route("token_classify"), body);
  const found = response.data.map(({ entity, entity_group: group, ...rest }) => ({ label: group ?? entity, ...rest }));
  drawMarked(element("entities-marked"), text, found);
  const points = [...text]; // positions count code points, and JavaScript's count halves of some
  drawBars(element("entities-list"), found.slice(0, MOST).map(({ label, score: value, start, end }) => (
    { label: points.slice(start, end).join(""), value, share: value, note: `${label} · ${start} to ${end}` }
  )));
  const [length] = await lengthsOf([text]);
  const said = [lengthText(length, response.cut > 0, info.max_input_length), found.length === 1 ? "1 entity" : `${number(found.length)} entities`];
  if (found.length > MOST) said.push(`the first ${MOST} are listed`);
  element("entities-note").textContent = said.filter(Boolean).join(", ");
  return { calls: [response] };
}

function drawMarked(place, text, found) {
  const points = [...text];
  const labels = [...new Set(found.map(({ label }) => label.replace(/^[BI]-/, "")))];
  const pieces = [];
  let done = 0;
  for (const { label, start, end } of found.toSorted((a, b) => a.start - b.start)) {
    if (start < done || start === end) continue; // its characters are marked already, or it has none
    const mark = make("mark", points.slice(start, end).join(""));
    mark.style.setProperty("--hue", `var(--part-${labels.indexOf(label.replace(/^[BI]-/, "")) % HUES})`);
    mark.append(make("span", label, { dir: "ltr" }));
    pieces.push(points.slice(done, start).join(""), mark);
    done = end;
  }
  place.replaceChildren(...pieces, points.slice(done).join(""));
}

// --- the weighted words of a text ---

const MOST_WORDS = 100;

VIEWS.sparse = { title: "Sparse", task: "sparse", run: weigh };

async function weigh() {
  const text = element("sparse-text").value.trim();
  if (!text) throw new Refused(400, "Write a text.");
  const response = await call(route("embed_sparse"), { inputs: text });
  const all = response.data[0].toSorted((a, b) => b.value - a.value);
  const shownOnes = all.slice(0, MOST_WORDS);
  const words = await wordsOf(shownOnes.map(({ index }) => index));
  const highest = shownOnes[0]?.value ?? 1;
  drawBars(element("sparse-list"), shownOnes.map(({ index, value }, i) => (
    { label: words[i], value, share: Math.max(0, value / highest), title: `id ${index}` }
  )));
  const [length] = await lengthsOf([text]);
  const said = [lengthText(length, response.cut > 0, info.max_input_length), count(all.length, "weight")];
  if (all.length > MOST_WORDS) said.push(`the ${MOST_WORDS} highest are shown`);
  element("sparse-note").textContent = said.filter(Boolean).join(", ");
  return { calls: [response] };
}

// --- a query's tokens against a document's: late interaction ---

const [MOST_ROWS, MOST_COLUMNS] = [64, 128];

VIEWS.match = { title: "Match", task: "multi_vector", run: match };

async function match() {
  const texts = [element("match-query").value.trim(), element("match-document").value.trim()];
  if (texts.includes("")) throw new Refused(400, "Write a query and a document.");
  const calls = [];
  for (const [i, role] of ["query", "document"].entries()) {
    const body = { model: info.served_model_name, input: [texts[i]], embedding_types: ["colbert"], input_type: role };
    calls.push(await call("v1/embeddings", body));
  }
  const [query, text] = calls.map((each) => each.data.data[0]);
  await drawMatch(query, text);
  const lengths = await lengthsOf(texts);
  element("match-note").textContent = ["Query", "Document"]
    .map((role, i) => {
      const length = lengthText(lengths[i], calls[i].cut > 0, calls[i].tokens);
      return `${role}: ${length && `${length}, `}${count([query, text][i].multi_vector.length, "vector")}.`;
    })
    .join(" ");
  return { calls };
}

async function drawMatch(query, text) {
  const values = query.multi_vector.map((a) => text.multi_vector.map((b) => dot(a, b)));
  const best = values.map((row) => row.indexOf(Math.max(...row)));
  const sum = values.reduce((total, row, i) => total + row[best[i]], 0);
  const shownOnes = values.slice(0, MOST_ROWS).map((row) => row.slice(0, MOST_COLUMNS));
  const [rowIds, columnIds] = [query.token_ids.slice(0, MOST_ROWS), text.token_ids.slice(0, MOST_COLUMNS)];
  const ids = [...new Set([...rowIds, ...columnIds, ...shownOnes.map((_, i) => text.token_ids[best[i]])])];
  const words = await wordsOf(ids);
  const word = (id) => words[ids.indexOf(id)];
  const rows = rowIds.map((id, i) => {
    const found = make("th", "", { class: "found" });
    found.append(make("bdi", word(text.token_ids[best[i]])), ` ${decimals(values[i][best[i]])}`);
    return [make("th", word(id), { scope: "row", dir: "auto" }), found];
  });
  const columns = columnIds.map((id) => make("th", word(id), { scope: "col" }));
  const head = [make("th", "query", { scope: "col" }), make("th", "best match", { scope: "col" }), ...columns];
  const say = (i, j) => {
    const mark = j === best[i] ? ", its best match" : "";
    element("match-cell").replaceChildren(`${values[i][j].toFixed(3)}: `, quote(word(rowIds[i])), " and ", quote(word(columnIds[j])), mark);
  };
  drawGrid(element("match-grid"), head, rows, shownOnes, { say, marked: (i, j) => j === best[i] });
  element("match-sum").textContent = `MaxSim ${sum.toFixed(3)}: a best match for each of ${count(values.length, "vector")}, added up, ${(sum / values.length).toFixed(3)} on average.`;
  const all = shownOnes.length === values.length && shownOnes[0].length === values[0].length;
  element("match-cell").textContent = all ? "Point at a cell, or move with the arrow keys." : `Shown are the first ${shownOnes.length} × ${shownOnes[0].length} of ${values.length} × ${values[0].length}.`;
}
