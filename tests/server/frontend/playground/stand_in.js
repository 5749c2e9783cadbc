// Answers of tasks that the default model does not have, in the page's place of `fetch`; all else is the real server's.
// A document's score is the number that it begins with; a token's vector is (cos id, sin id), and a document that ends
// with "!" has no vector for its last token. `window.cut` is sent as x-truncated-texts with every answer,
// and what is in `window.info` stands in /info.
(() => {
  const real = window.fetch;
  window.asked = [];
  const headers = () => ({
    "server-timing": "tokenize;dur=1, queue;dur=2, inference;dur=3, total;dur=7", "x-compute-tokens": "9",
    ...(window.cut ? { "x-truncated-texts": `${window.cut}` } : {}),
  });
  const answer = (data) => new Response(JSON.stringify(data), { headers: headers() });
  const fakes = {
    "/v1/rerank": ({ documents }) => ({
      results: documents.map((text, index) => ({ index, relevance_score: parseFloat(text) || 0 })), usage: { total_tokens: 9 },
    }),
    "/embed_sparse": () => [[{ index: 101, value: 0.25 }, { index: 2088, value: 0.75 }, { index: 7592, value: 1.5 }]],
    "/predict": () => [{ score: 0.9, label: "joy" }, { score: 0.09996, label: "anger" }, { score: 0.00004, label: "fear" }],
    "/v1/embeddings": async ({ input, embedding_types: types }) => {
      if (!types) return null;
      const asked = await real("tokenize", { method: "POST", body: JSON.stringify({ inputs: input }), headers: { "content-type": "application/json" } });
      const data = (await asked.json()).map((tokens, index) => {
        const kept = input[index].endsWith("!") ? tokens.slice(0, -1) : tokens;
        return { index, multi_vector: kept.map(({ id }) => [Math.cos(id), Math.sin(id)]), token_ids: kept.map(({ id }) => id) };
      });
      return { object: "list", data };
    },
  };
  window.fetch = async (path, options = {}) => {
    const route = new URL(path, location.href).pathname;
    const body = options.body && JSON.parse(options.body);
    if (body) window.asked.push([route, body]);
    const made = body && await fakes[route]?.(body);
    if (made) return answer(made);
    const given = await real(path, options);
    if (route === "/info") {
      const info = await given.json();
      const tasks = ["embed", "tokens", "classify", "rerank", "sparse", "multi_vector"];
      return answer({ ...info, tasks, ...window.info });
    }
    if (!window.cut || !given.ok) return given;
    return new Response(await given.text(), { headers: { ...Object.fromEntries(given.headers), "x-truncated-texts": `${window.cut}` } });
  };
})();
