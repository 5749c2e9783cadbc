// --- the similarity of texts ---

const DENSE = 14; // more texts than this: small cells
const WIDE = 6; // more texts than this: over the whole width
const MOST = 64; // more than this many rows nobody reads
const NAMED = 5; // cut texts that are named each

const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0); // a cosine: the server has normalised them

VIEWS.similarity = { title: "Similarity", task: "embed", run: compare };

async function compare() {
  const texts = lines("texts");
  if (texts.length === 0) throw new Refused(400, "Write at least one text.");
  const [dimensions, prompt] = [Number(element("dimensions").value), element("prompt").value];
  const body = { model: info.served_model_name, input: texts };
  if (dimensions) body.dimensions = dimensions;
  if (prompt) body.prompt_name = prompt;
  const answer = await call("v1/embeddings", body);
  const vectors = answer.data.data.map(({ embedding }) => embedding);
  const lengths = await lengthsOf(texts.slice(0, MOST), prompt);
  showMatrix(texts, vectors, lengths, answer.cut);
  return { calls: [answer], python: embeddingsInPython(body), vectors: { texts, rows: vectors } };
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
