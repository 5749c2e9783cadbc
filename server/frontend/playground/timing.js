// --- the parts of a request; of several, one after the other, their sums ---

const PARTS = [
  ["tokenize", "tokenize", "texts to token ids"],
  ["queue", "queue", "waiting for a batch"],
  ["inference", "inference", "the batch on the encoder"],
  ["rest", "rest of the server", "reading, handing over, writing"],
  ["network", "network, browser", "all that is not the server"],
];

function showTiming(calls) {
  element("timing").hidden = !calls.every(({ timing }) => timing); // a proxy may leave the header out
  if (element("timing").hidden) return;
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const given = { tokenize: 0, queue: 0, inference: 0, total: 0 };
  for (const { timing } of calls) {
    for (const [, name, ms] of timing.matchAll(/(\w+);dur=([\d.]+)/g)) given[name] += Number(ms);
  }
  const total = sum(calls.map((each) => each.total));
  const tokens = sum(calls.map((each) => each.tokens));
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
  const last = make("tr", "", { class: "sum" });
  const all = make("th", "in all", { scope: "row" });
  all.style.setProperty("--part", "transparent");
  last.append(all, make("td", total.toFixed(2)), make("td", count(tokens, "token")));
  element("part-list").tBodies[0].replaceChildren(...list, last);
}
