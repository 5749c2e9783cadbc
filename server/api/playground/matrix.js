// --- the similarity matrix ---

const DENSE = 14; // more texts than this: colours only
const MOST = 64; // more than this many rows nobody reads

function rows(bytes, width) {
  const view = new DataView(bytes);
  const found = [];
  for (let start = 0; start < bytes.byteLength; start += 4 * width) {
    found.push(Float32Array.from({ length: width }, (_, i) => view.getFloat32(start + 4 * i, true)));
  }
  return found;
}

const cosine = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0); // the server has normalised them

function showMatrix(allTexts, vectors) {
  const texts = allTexts.slice(0, MOST);
  const table = element("matrix");
  table.className = texts.length > DENSE ? "dense" : "";
  const head = make("tr");
  head.append(make("td"), ...texts.map((text, i) => make("th", i + 1, { scope: "col", title: text })));
  const body = texts.map((text, i) => {
    const row = make("tr");
    row.append(make("th", `${i + 1}  ${text}`, { scope: "row", title: text }));
    texts.forEach((_, j) => {
      const value = cosine(vectors[i], vectors[j]);
      const cell = make("td", value.toFixed(2).replace("-0.00", "0.00"), { "data-row": i, "data-column": j });
      cell.style.setProperty("--heat", `${Math.round(100 * Math.min(1, Math.max(0, value)))}%`);
      row.append(cell);
    });
    return row;
  });
  const [thead, tbody] = [make("thead"), make("tbody")];
  thead.append(head);
  tbody.append(...body);
  table.replaceChildren(table.caption, thead, tbody);
  element("result").hidden = false;

  const say = (i, j, before = "") => {
    element("pair").textContent = `${before}${cosine(vectors[i], vectors[j]).toFixed(3)}: “${texts[i]}” and “${texts[j]}”`;
  };
  let best = null;
  for (let i = 0; i < texts.length; i += 1) {
    for (let j = i + 1; j < texts.length; j += 1) {
      if (!best || cosine(vectors[i], vectors[j]) > cosine(vectors[best[0]], vectors[best[1]])) best = [i, j];
    }
  }
  element("pair").textContent = "";
  if (best) say(...best, "Closest, ");
  if (allTexts.length > MOST) element("pair").textContent += ` (the first ${MOST} of ${allTexts.length} are shown)`;
  tbody.onpointerover = ({ target }) => {
    if (!target.dataset.row) return;
    tbody.querySelector(".on")?.classList.remove("on");
    target.classList.add("on");
    say(Number(target.dataset.row), Number(target.dataset.column));
  };
}
