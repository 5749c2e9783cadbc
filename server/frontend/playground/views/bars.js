// --- a list of things with a number each: a bar, and the number ---

const score = (value) => (value === 0 || Math.abs(value) >= 0.001 ? value.toFixed(3) : value.toExponential(1));

function shares(values) { // of the bar's width: the value itself where all are 0 … 1, as probabilities are
  const [low, high] = [Math.min(0, ...values), Math.max(1, ...values)];
  return values.map((value) => (value - low) / (high - low));
}

function drawBars(list, entries) { // { label, value, share, note?, title? }
  list.replaceChildren(...entries.map(({ label, value, share, note = "", title = "" }) => {
    const [entry, name, track, bar] = [make("li"), make("div", "", { class: "name" }), make("div", "", { class: "track", "aria-hidden": true }), make("i")];
    name.append(make("p", short(label, 300), { dir: "auto", title }));
    if (note) name.append(make("p", note, { class: "hint" }));
    bar.style.width = `${100 * share}%`;
    track.append(bar);
    entry.append(name, track, make("data", score(value), { value }));
    return entry;
  }));
}
