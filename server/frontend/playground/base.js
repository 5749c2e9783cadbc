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
  const response = await fetch(path, { cache: "no-store", ...options }).catch(({ message }) => {
    throw new Refused(0, `The server cannot be reached: ${message}`);
  });
  if (response.ok) return response;
  const text = await response.text();
  let message = text;
  try {
    const { error } = JSON.parse(text);
    message = error?.message ?? error ?? text;
  } catch { /* not ours: a proxy's page, shown as it is */ }
  if (response.status === 401) showKeyForm(sent);
  throw new Refused(response.status, message);
}

async function call(path, body) { // a request for work, and all that the page shows of it
  const started = performance.now();
  const response = await ask(path, body);
  const text = await response.text();
  return {
    path, body, text,
    data: JSON.parse(text),
    total: performance.now() - started,
    timing: response.headers.get("server-timing"),
    tokens: Number(response.headers.get("x-compute-tokens")),
    cut: Number(response.headers.get("x-truncated-texts")), // how many texts
  };
}

// --- which of the server's models the page asks: the address names it, #model=NAME&VIEW ---

let models = []; // what /info says of each; `info` is the one that is asked

const several = () => models.length > 1;
const naming = () => (several() ? { model: info.served_model_name } : {}); // in a body
const inPath = (name) => name.split("/").map(encodeURIComponent).join("/");
const route = (path) => (several() ? `models/${inPath(info.served_model_name)}/${path}` : path);

function address() { // the model and the view that it names; either may be missing
  const parts = location.hash.slice(1).split("&");
  const model = parts.find((part) => part.startsWith("model="))?.slice(6);
  let name = model;
  try {
    name = model && decodeURIComponent(model);
  } catch { /* typed by hand: no model has such a name */ }
  return { name, view: parts.find((part) => !part.includes("=")) };
}

const addressOf = (name, view) => (several() ? `model=${inPath(name)}&${view}` : view);
const wantedModel = () => models.find((model) => model.served_model_name === address().name) ?? models[0];

function showChooser() {
  element("chooser").replaceChildren(...models.map(({ served_model_name: name }) => make("option", name, { value: name })));
  element("chooser-label").hidden = !several();
  element("model").hidden = several();
}

function showStates(states) { // of each model, those included that cannot be read
  if (!several()) return;
  const options = new Map([...element("chooser").options].map((option) => [option.value, option]));
  for (const [name, state] of Object.entries(states)) {
    if (!options.has(name)) {
      const option = make("option", name, { value: name, disabled: "" });
      element("chooser").append(option);
      options.set(name, option);
    }
    const shownText = state === "ready" ? name : `${name} (${state})`;
    if (options.get(name).textContent !== shownText) options.get(name).textContent = shownText;
  }
}

element("chooser").addEventListener("change", () => {
  location.hash = addressOf(element("chooser").value, view);
});

// --- the API key, and the pages of this server that a link cannot carry it to ---

const ELSEWHERE = { docs: showRoutes, metrics: showMetrics };
let linksChecked = false;

function showKeyForm(refused) { // `refused` is the key that was sent
  if (refused !== key) return; // another one has been typed since
  element("key-form").hidden = false;
  if (refused) {
    key = "";
    element("key-message").textContent = "The server does not take this key.";
    element("key").setAttribute("aria-invalid", "true");
  }
  if (!linksChecked) checkLinks();
}

function focusKey() { // never from under what somebody types
  if (document.activeElement !== document.body && !element("key-form").contains(document.activeElement)) return;
  element("key").focus();
  element("key").select();
}

function hideKeyForm() {
  const focused = element("key-form").contains(document.activeElement);
  element("key-form").hidden = true;
  element("key-message").textContent = "";
  element("key").removeAttribute("aria-invalid");
  if (focused) element(`view-${view}`).querySelector("textarea, input").focus();
}

async function checkLinks() {
  linksChecked = true;
  for (const link of document.querySelectorAll("nav a")) {
    const response = await fetch(link.href, { method: "HEAD", cache: "no-store" }).catch(() => null);
    if (response?.status !== 401) continue;
    const path = link.getAttribute("href");
    const button = make("button", link.textContent, { type: "button", class: "link", "aria-haspopup": "dialog" });
    button.addEventListener("click", () => openElsewhere(path, link.textContent));
    link.replaceWith(button);
  }
}

async function openElsewhere(path, title) {
  const hint = `A link cannot carry the key, so this is shown here. embert serve --keyless ${path} opens the page itself.`;
  let text = "";
  try {
    text = await ELSEWHERE[path]();
  } catch (error) {
    text = error.status === 401 ? "This needs the API key." : error.message;
  }
  element("elsewhere-title").textContent = title;
  element("elsewhere-hint").textContent = hint;
  element("elsewhere-text").textContent = text;
  element("elsewhere").showModal();
}

async function showRoutes() {
  const { paths } = await (await ask("openapi.json")).json();
  return Object.entries(paths)
    .flatMap(([path, methods]) => Object.entries(methods).map(([method, { summary }]) => [`${method.toUpperCase()} ${path}`, summary]))
    .map(([route, summary]) => `${route.padEnd(24)} ${summary ?? ""}`)
    .join("\n");
}

async function showMetrics() {
  return (await ask("metrics", null, "text/plain")).text();
}

element("elsewhere-close").addEventListener("click", () => element("elsewhere").close());
element("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = element("key").value.trim();
  element("key-message").textContent = "";
  begin();
});

// --- lists of tabs: click, arrow keys, Home and End ---

const tabsOf = (list) => [...list.querySelectorAll("[role=tab]:not([hidden])")];

function selectTab(list, id) {
  for (const tab of tabsOf(list)) {
    tab.setAttribute("aria-selected", tab.id === id);
    tab.tabIndex = tab.id === id ? 0 : -1;
  }
}

function followTabs(list, choose) { // `choose` gets the tab's id
  list.addEventListener("click", ({ target }) => {
    const tab = target.closest("[role=tab]");
    if (tab) choose(tab.id);
  });
  list.addEventListener("keydown", (event) => {
    const tabs = tabsOf(list);
    const at = tabs.indexOf(event.target);
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (at < 0 || next === undefined) return;
    event.preventDefault();
    const tab = tabs.at(next % tabs.length);
    choose(tab.id);
    tab.focus();
  });
}
