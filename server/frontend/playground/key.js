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
    const answer = await fetch(link.href, { method: "HEAD", cache: "no-store" }).catch(() => null);
    if (answer?.status !== 401) continue;
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
