// --- how many tokens texts have, and which of them were cut ---

const MEASURED_TEXTS = 65; // a query, and as many documents as are shown
const MEASURED_CHARACTERS = 500_000;

async function lengthsOf(texts, prompt = "") { // of the first texts; none where that is too much to ask
  const asked = texts.slice(0, MEASURED_TEXTS);
  if (asked.reduce((sum, text) => sum + text.length, 0) > MEASURED_CHARACTERS) return [];
  const body = { inputs: asked };
  if (prompt) body.prompt_name = prompt;
  try {
    return (await (await ask(route("tokenize"), body)).json()).map((tokens) => tokens.length);
  } catch { // the answer stands without its lengths
    return [];
  }
}

function longest(lengths, many) { // the indices of the longest: what is cut is longer than what is not
  return new Set(lengths.map((_, i) => i).sort((a, b) => lengths[b] - lengths[a]).slice(0, many));
}

function lengthText(length, cut, limit) {
  if (length === undefined) return "";
  return cut ? `cut to ${number(limit)} of ${count(length, "token")}` : count(length, "token");
}

function cutText(many, all, limit) {
  return many ? `${number(many)} of ${count(all, "text")} ${many === 1 ? "was" : "were"} cut to ${number(limit)} tokens.` : "";
}
