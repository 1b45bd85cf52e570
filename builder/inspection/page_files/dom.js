// Elements and figures. Text only ever gets into the page as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function element(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, to]) => made.style.setProperty(key, to));
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

const html = (tag, attributes = {}, ...children) => element(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => element(document.createElementNS(SVG, tag), attributes, children);
const replace = (root, ...children) => root.replaceChildren(...children.flat(Infinity).filter(Boolean));
const find = (id) => document.getElementById(id);
const classes = (...names) => names.filter(Boolean).join(" ");

function scaled(value, base, units) {
  let unit = 0;
  while (Math.abs(value) >= base * 0.9995 && unit < units.length - 1) {
    value /= base;
    unit += 1;
  }
  const digits = unit === 0 || Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[unit]}`.trim();
}

const formatBytes = (bytes) => scaled(bytes, 1000, ["B", "kB", "MB", "GB", "TB"]);
const formatMemory = (bytes) => scaled(bytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
const formatFlops = (flops) => scaled(flops, 1000, ["", "k", "M", "G", "T", "P"]);
const formatCount = (count) => count.toLocaleString("en-US");

function formatShare(share) {
  if (share === 0) return "0%";
  if (share > 0 && share < 0.0001) return "<0.01%";
  return `${(100 * share).toFixed(share < 0.0995 ? 2 : 1)}%`;
}

function formatSeconds(seconds) {
  if (seconds === null) return "unknown";
  return seconds === 0 ? "0" : scaled(seconds * 1e9, 1000, ["ns", "µs", "ms", "s"]);
}

// A dim is an extent, a name, or a product such as "4*T". NaN for a name that is not in `dims`.
const extentOf = (dim, dims) => String(dim).split("*").reduce((product, factor) => product * (dims[factor] ?? Number(factor)), 1);

// A shape with its named dims, and with their extents if they are given.
const formatShape = (shape, dims = {}) => `[${shape.map((dim) => extentOf(dim, dims) || dim).join(", ")}]`;

// Of one row: what is dynamic counts once.
const elements = (shape) => shape.reduce((product, dim) => product * (parseInt(dim) || 1), 1);

// The text with what matches of the words marked.
function marked(text, words) {
  if (!words.length) return [text];
  const pattern = new RegExp(words.map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|"), "gi");
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    parts.push(text.slice(end, match.index), html("mark", {}, match[0]));
    end = match.index + match[0].length;
  }
  return [...parts, text.slice(end)];
}

// A path that may break behind its dots and underscores.
const breakable = (path) => path.split(/(?<=[._:])/).flatMap((part, i) => (i ? [html("wbr"), part] : [part]));

const clipped = (text, length) => (text.length <= length ? text : `…${text.slice(text.length - length + 1)}`);
