// --- the parts of one request ---

const PARTS = [
  ["tokenize", "tokenise", "texts to token ids"],
  ["queue", "queue", "waiting for a batch"],
  ["inference", "inference", "the batch on the encoder"],
  ["rest", "rest of the server", "reading, handing over, writing"],
  ["network", "network, browser", "all that is not the server"],
];

function showTiming(header, total, tokens) {
  const given = Object.fromEntries([...header.matchAll(/(\w+);dur=([\d.]+)/g)].map(([, name, ms]) => [name, Number(ms)]));
  const known = given.tokenize + given.queue + given.inference;
  const parts = { ...given, rest: Math.max(0, given.total - known), network: Math.max(0, total - given.total) };
  element("parts").replaceChildren(...PARTS.map(([name], i) => {
    const bar = make("i");
    bar.style.flexGrow = parts[name];
    bar.style.background = `var(--part-${i})`;
    return bar;
  }));
  const list = PARTS.map(([name, label, meaning], i) => {
    const row = make("tr", "", { "data-part": name });
    const title = make("th", label, { scope: "row" });
    title.style.setProperty("--part", `var(--part-${i})`);
    row.append(title, make("td", parts[name].toFixed(2)), make("td", meaning));
    return row;
  });
  const sum = make("tr", "", { class: "sum" });
  const all = make("th", "in all", { scope: "row" });
  all.style.setProperty("--part", "transparent");
  sum.append(all, make("td", total.toFixed(2)), make("td", `${number(tokens)} tokens`));
  element("part-list").tBodies[0].replaceChildren(...list, sum);
  element("timing").hidden = false;
}
