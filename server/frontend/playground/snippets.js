// --- curl and Python for what was just done ---

const inShell = (value) => `'${value.replaceAll("'", "'\\''")}'`;
const inPython = (value) => JSON.stringify(value, null, 4); // requests have no true, false or null
const baseUrl = () => new URL(".", location.href).href.replace(/\/$/, "");

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
      `answer = httpx.post("${baseUrl()}/${path}", json=${inPython(body)}${headers})`,
      "print(answer.raise_for_status().json())",
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
    `answer = client.embeddings.create(model=${JSON.stringify(model)}, input=texts${options})`,
    "vectors = np.array([item.embedding for item in answer.data])",
    "print((vectors @ vectors.T).round(2))",
  ].join("\n");
}
