// --- the request as code, the answer as JSON, its vectors; each to be copied ---

const SHOWN_CHARACTERS = 20_000; // of a long one; what is copied is whole
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/;
let contents = {}; // name → a function that gives the text
let chosen = "curl";

function pretty(text) { // numbers of one list in one line
  if (text.length > 2_000_000) return text;
  return JSON.stringify(JSON.parse(text), null, 2).replace(/\[\s+(-?\d[-\d.e+,\s]*)\s+\]/g, (_, list) => `[${list.replace(/\s+/g, " ")}]`);
}

function isolated(text) { // strings of right-to-left text would change places with their neighbours
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
