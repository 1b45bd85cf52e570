// The search box: every word must be found in an entry, of any program of the bundle.

const SHOWN_MATCHES = 200;

function searchEntries(model) {
  return model.parts.flatMap((part) => {
    const entry = (kind, name, note, more = "") => ({ part, kind, name, note, text: `${name} ${note} ${more}`.toLowerCase() });
    return [
      ...part.ops.map((op) => entry("op", op.path, op.title, `${op.op} ${op.component.name} ${op.kind}`)),
      ...part.ops.flatMap((op) => op.outputs.filter((value) => value.name !== op.path).map((value) => ({ ...entry("op", value.name, "tensor"), target: op.path }))),
      ...[...part.states.values()].map((state) => entry("state", state.name, "state", state.kind)),
      ...[...part.weights.values()].map((weight) => entry("weight", weight.name, "weight", `${weight.dtype} ${weight.component} ${weight.sources.join(" ")}`)),
      ...[...part.values.values()].filter((value) => value.isInput).map((value) => entry("input", value.name, "input")),
    ];
  });
}

class Search {
  // `changed(matches)` is called with the entries that are found, `choose(entry)` with the one that is taken.
  constructor(input, list, entries, { changed, choose }) {
    Object.assign(this, { input, list, entries, changed, choose, matches: [], at: 0 });
    input.addEventListener("input", () => this.update());
    input.addEventListener("focus", () => this.show(this.words.length > 0));
    input.addEventListener("blur", () => this.show(false));
    input.addEventListener("keydown", (event) => this.key(event));
  }

  get words() {
    return this.input.value.toLowerCase().split(/\s+/).filter(Boolean);
  }

  set(query) {
    this.input.value = query;
    this.update();
    this.show(document.activeElement === this.input && query !== "");
  }

  update() {
    const words = this.words;
    this.matches = words.length ? this.entries.filter((entry) => words.every((word) => entry.text.includes(word))) : [];
    this.at = 0;
    this.list.replaceChildren(...this.matches.slice(0, SHOWN_MATCHES).map((entry, i) => this.row(entry, i, words)), ...this.note(words));
    this.show(words.length > 0);
    this.mark();
    this.changed(this.matches);
  }

  row(entry, i, words) {
    const take = (event) => (event.preventDefault(), this.take(i));
    return html("li", { id: `match-${i}`, role: "option", onmousedown: take }, html("span", { class: "path" }, marked(entry.name, words)),
      html("small", {}, entry.part.name === "model" ? marked(entry.note, words) : [`${entry.part.name}, `, marked(entry.note, words)]));
  }

  note(words) {
    const more = this.matches.length - SHOWN_MATCHES;
    if (more > 0) return [html("li", { class: "note" }, `and ${formatCount(more)} more`)];
    return words.length && !this.matches.length ? [html("li", { class: "note" }, "nothing found")] : [];
  }

  show(isShown) {
    this.list.hidden = !isShown;
    this.input.setAttribute("aria-expanded", String(isShown));
  }

  mark() {
    for (const [i, row] of [...this.list.querySelectorAll("[role=option]")].entries()) row.setAttribute("aria-selected", String(i === this.at));
    const row = find(`match-${this.at}`);
    row?.scrollIntoView({ block: "nearest" });
    if (row) this.input.setAttribute("aria-activedescendant", row.id);
    else this.input.removeAttribute("aria-activedescendant");
  }

  take(i) {
    if (!this.matches[i]) return;
    this.show(false);
    this.choose(this.matches[i]);
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key], last = Math.min(this.matches.length, SHOWN_MATCHES) - 1;
    if (step !== undefined) this.at = Math.max(0, Math.min(last, this.at + step)), this.show(last >= 0), this.mark();
    else if (event.key === "Enter") this.take(this.at);
    else if (event.key === "Escape") this.input.value === "" ? this.input.blur() : this.set("");
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
