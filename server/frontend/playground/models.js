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
