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

// --- curl and Python for what was just done ---

const inShell = (value) => `'${value.replaceAll("'", "'\\''")}'`;
const inPython = (value) => JSON.stringify(value, null, 4); // requests have no true, false or null
const baseUrl = () => new URL(".", document.baseURI).href.replace(/\/$/, "");

function inCurl(calls) {
  return calls.map(({ path, body }) => [
    `curl ${baseUrl()}/${path} -H 'content-type: application/json'`,
    ...(key ? ['-H "authorization: Bearer $EMBERT_API_KEY"'] : []),
    `-d ${inShell(JSON.stringify(body))}`,
  ].join(" \\\n  ")).join("\n");
}

function postsInPython(calls) {
  const headers = key ? ', headers={"authorization": f"Bearer {os.environ[\'EMBERT_API_KEY\']}"}' : "";
  return [
    ...(key ? ["import os", ""] : []),
    "import httpx",
    "",
    ...calls.flatMap(({ path, body }) => [
      `response = httpx.post("${baseUrl()}/${path}", json=${inPython(body)}${headers})`,
      "print(response.raise_for_status().json())",
    ]),
  ].join("\n");
}

function embeddingsInPython({ model, input, dimensions, prompt_name: prompt }) {
  const options = `${dimensions ? `, dimensions=${dimensions}` : ""}${prompt ? `, extra_body={"prompt_name": ${JSON.stringify(prompt)}}` : ""}`;
  return [
    ...(key ? ["import os", ""] : []),
    "import numpy as np",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${baseUrl()}/v1", api_key=${key ? 'os.environ["EMBERT_API_KEY"]' : '"none"'})`,
    "texts = [",
    ...input.map((text) => `    ${JSON.stringify(text)},`),
    "]",
    `response = client.embeddings.create(model=${JSON.stringify(model)}, input=texts${options})`,
    "vectors = np.array([item.embedding for item in response.data])",
    "print((vectors @ vectors.T).round(2))",
  ].join("\n");
}

// --- the request as code, the response as JSON, its vectors; each to be copied ---

const SHOWN_CHARACTERS = 20_000; // of a long one; what is copied is whole
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/;
let contents = {}; // name → a function that gives the text
let chosen = "curl";

function pretty(text) { // numbers of one list in one line
  if (text.length > 2_000_000) return text;
  return JSON.stringify(JSON.parse(text), null, 2).replace(/\[\s+(-?\d[-\d.e+,\s]*)\s+\]/g, (_, list) => `[${list.replace(/\s+/g, " ")}]`);
}

function isolated(text) { // strings of right-to-left text would change places with their neighbors
  if (!RIGHT_TO_LEFT.test(text)) return [text];
  const parts = text.split(/("(?:[^"\\]|\\.)*")/);
  return parts.map((part) => (RIGHT_TO_LEFT.test(part) ? make("bdi", part) : part));
}

function showAnswer({ calls, python, vectors }) {
  contents = {
    curl: () => inCurl(calls),
    python: () => python ?? postsInPython(calls),
    json: () => calls.map(({ text }) => pretty(text)).join("\n"),
  };
  if (vectors) contents.vector = () => `[${vectors.rows[Number(element("which").value)].join(", ")}]`;
  element("tab-vector").hidden = !vectors;
  element("which").replaceChildren(...(vectors?.texts ?? []).map((text, i) => make("option", `${i + 1}  ${short(text, 60)}`, { value: i })));
  element("code").hidden = false;
  choose(chosen in contents ? chosen : "curl");
}

function choose(name) {
  chosen = name;
  selectTab(element("forms"), `tab-${name}`);
  element("which-label").hidden = name !== "vector";
  element("snippet").setAttribute("aria-labelledby", `tab-${name}`);
  element("snippet").className = name;
  const text = contents[name]();
  const cut = text.length > SHOWN_CHARACTERS;
  element("snippet").firstElementChild.replaceChildren(...isolated(cut ? text.slice(0, SHOWN_CHARACTERS) : text));
  element("copied").textContent = cut ? `${number(SHOWN_CHARACTERS)} of ${number(text.length)} characters; all are copied` : "";
}

followTabs(element("forms"), (id) => choose(id.slice(4)));
element("which").addEventListener("change", () => choose("vector"));
element("copy").addEventListener("click", async () => {
  const text = contents[chosen]();
  try {
    await navigator.clipboard.writeText(text);
    element("copied").textContent = "copied";
  } catch { // no clipboard without https: select, so that the keyboard can copy
    element("snippet").firstElementChild.textContent = text;
    getSelection().selectAllChildren(element("snippet"));
    element("copied").textContent = "selected";
  }
});
