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
  const [query, text] = calls.map((each) => each.data.data[0].multi_vector);
  const tokens = await tokensOf(texts);
  drawMatch(query, text, labels(query, tokens[0]), labels(text, tokens[1]));
  element("match-note").textContent = ["query", "document"]
    .map((role, i) => `${role}: ${[tokens[i] && count(tokens[i].length, "token"), calls[i].cut && "cut", count([query, text][i].length, "vector")].filter(Boolean).join(", ")}`)
    .join("; ");
  return { calls };
}

async function tokensOf(texts) {
  if (texts[0].length + texts[1].length > MEASURED_CHARACTERS) return [];
  try {
    return await (await ask("tokenize", { inputs: texts })).json();
  } catch {
    return [];
  }
}

// Rows may be left out, as a document's punctuation: then words would stand at the wrong rows, and numbers are right.
const labels = (rows, tokens) => rows.map((_, i) => (tokens?.length === rows.length ? tokens[i].text : `${i + 1}`));

function drawMatch(query, text, queryLabels, textLabels) {
  const values = query.map((a) => text.map((b) => dot(a, b)));
  const best = values.map((row) => row.indexOf(Math.max(...row)));
  const sum = values.reduce((total, row, i) => total + row[best[i]], 0);
  const rows = queryLabels.slice(0, MOST_ROWS).map((label, i) => {
    const found = make("th", "", { class: "found" });
    found.append(make("bdi", textLabels[best[i]]), ` ${decimals(values[i][best[i]])}`);
    return [make("th", label, { scope: "row", dir: "auto" }), found];
  });
  const columns = textLabels.slice(0, MOST_COLUMNS).map((label) => make("th", label, { scope: "col" }));
  const head = [make("th", "query", { scope: "col" }), make("th", "best match", { scope: "col" }), ...columns];
  const say = (i, j) => {
    const mark = j === best[i] ? ", its best match" : "";
    element("match-cell").replaceChildren(`${values[i][j].toFixed(3)}: `, quote(queryLabels[i]), " and ", quote(textLabels[j]), mark);
  };
  const shownOnes = values.slice(0, MOST_ROWS).map((row) => row.slice(0, MOST_COLUMNS));
  drawGrid(element("match-grid"), head, rows, shownOnes, { say, marked: (i, j) => j === best[i] });
  element("match-sum").textContent = `MaxSim ${sum.toFixed(3)}: a best match for each of ${count(query.length, "vector")}, added up, ${(sum / query.length).toFixed(3)} on average.`;
  element("match-cell").textContent = shownOnes.length < values.length || shownOnes[0].length < text.length ? `Shown are the first ${shownOnes.length} × ${shownOnes[0].length} of ${values.length} × ${text.length}.` : "Point at a cell, or move with the arrow keys.";
}
