// --- what the other files use: elements, and questions to this server; nothing comes from anywhere else ---

const VIEWS = {}; // name → { title, task, run }

const element = (id) => document.getElementById(id);
const make = (name, text = "", attributes = {}) => {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};
const number = (value) => value.toLocaleString("en").replaceAll(",", " ");
const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
const lines = (id) => element(id).value.split("\n").map((text) => text.trim()).filter(Boolean);
const short = (text, most = 160) => (text.length > most ? `${[...text.slice(0, 2 * most)].slice(0, most).join("")}…` : text);
// Isolated from what is around it: two right-to-left texts in one line would change places.
const quote = (text) => {
  const quoted = make("span", "“");
  quoted.append(make("bdi", short(text)), "”");
  return quoted;
};

let info = null;
let key = "";

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const authorization = () => (key ? { authorization: `Bearer ${key}` } : {});

async function ask(path, body, accept = "application/json") {
  const sent = key;
  const headers = { accept, ...authorization() };
  if (body) headers["content-type"] = "application/json";
  const options = body ? { method: "POST", headers, body: JSON.stringify(body) } : { headers };
  const answer = await fetch(path, { cache: "no-store", ...options }).catch(({ message }) => {
    throw new Refused(0, `The server cannot be reached: ${message}`);
  });
  if (answer.ok) return answer;
  const text = await answer.text();
  let message = text;
  try {
    const { error } = JSON.parse(text);
    message = error?.message ?? error ?? text;
  } catch { /* not ours: a proxy's page, shown as it is */ }
  if (answer.status === 401) showKeyForm(sent);
  throw new Refused(answer.status, message);
}

async function call(path, body) { // a request for work, and all that the page shows of it
  const started = performance.now();
  const answer = await ask(path, body);
  const text = await answer.text();
  return {
    path, body, text,
    data: JSON.parse(text),
    total: performance.now() - started,
    timing: answer.headers.get("server-timing"),
    tokens: Number(answer.headers.get("x-compute-tokens")),
    cut: Number(answer.headers.get("x-truncated-texts")), // how many texts
  };
}
