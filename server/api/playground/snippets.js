// --- curl and Python for what was just done ---

let snippets = {};
let chosen = "curl";

function showSnippets({ texts, dimensions, prompt }) {
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  const body = { model: info.served_model_name, input: texts };
  if (dimensions) body.dimensions = dimensions;
  if (prompt) body.prompt_name = prompt;
  const quoted = (value) => `'${value.replaceAll("'", "'\\''")}'`;
  snippets = {
    curl: [
      `curl ${base}/v1/embeddings -H 'content-type: application/json'`,
      ...(key ? ['-H "authorization: Bearer $EMBERT_API_KEY"'] : []),
      `-d ${quoted(JSON.stringify(body))}`,
    ].join(" \\\n  "),
    python: [
      ...(key ? ["import os", ""] : []),
      "import numpy as np",
      "from openai import OpenAI",
      "",
      `client = OpenAI(base_url="${base}/v1", api_key=${key ? 'os.environ["EMBERT_API_KEY"]' : '"none"'})`,
      "texts = [",
      ...texts.map((text) => `    ${JSON.stringify(text)},`),
      "]",
      "answer = client.embeddings.create(",
      `    model=${JSON.stringify(info.served_model_name)}, input=texts${dimensions ? `, dimensions=${dimensions}` : ""}${prompt ? `, extra_body={"prompt_name": ${JSON.stringify(prompt)}}` : ""}`,
      ")",
      "vectors = np.array([item.embedding for item in answer.data])",
      "print((vectors @ vectors.T).round(2))",
    ].join("\n"),
  };
  element("code").hidden = false;
  choose(chosen);
}

function choose(name) {
  chosen = name;
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const selected = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", selected);
    tab.tabIndex = selected ? 0 : -1;
  }
  element("snippet").setAttribute("aria-labelledby", `tab-${name}`);
  element("snippet").firstElementChild.textContent = snippets[name];
  element("copied").textContent = "";
}

for (const tab of document.querySelectorAll("[role=tab]")) {
  tab.addEventListener("click", () => choose(tab.id.slice(4)));
  tab.addEventListener("keydown", ({ key: pressed }) => {
    if (pressed !== "ArrowLeft" && pressed !== "ArrowRight") return;
    choose(chosen === "curl" ? "python" : "curl");
    element(`tab-${chosen}`).focus();
  });
}
element("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(snippets[chosen]);
    element("copied").textContent = "copied";
  } catch { // no clipboard without https: select, so that the keyboard can copy
    getSelection().selectAllChildren(element("snippet"));
    element("copied").textContent = "selected";
  }
});
