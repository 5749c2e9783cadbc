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
