// --- the words of token ids ---

async function wordsOf(ids) { // an id stands for itself where it has no word
  if (ids.length === 0) return [];
  let words = [];
  try {
    words = await (await ask(route("decode"), { ids: ids.map((id) => [id]), skip_special_tokens: false })).json();
  } catch { /* ids, then */ }
  return ids.map((id, i) => words[i]?.trim() || `#${id}`);
}
