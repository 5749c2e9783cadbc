// --- what the other files use: elements, and questions to this server; nothing comes from anywhere else ---

const element = (id) => document.getElementById(id);
const make = (name, text = "", attributes = {}) => {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};
const number = (value) => value.toLocaleString("en").replaceAll(",", " ");

let info = null;
let key = "";

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, body, accept = "application/json") {
  const headers = { accept };
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  const options = body ? { method: "POST", headers, body: JSON.stringify(body) } : { headers };
  const answer = await fetch(path, { cache: "no-store", ...options });
  if (answer.ok) return answer;
  const text = await answer.text();
  let message = text;
  try {
    const { error } = JSON.parse(text);
    message = error?.message ?? error ?? text;
  } catch { /* not ours: a proxy's page, shown as it is */ }
  if (answer.status === 401) {
    element("key-form").hidden = false;
    element("key").focus();
  }
  throw new Refused(answer.status, message);
}
