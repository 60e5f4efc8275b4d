"use strict";
// The page's script. Texts come from models: they are put in as text nodes and never as markup.
(() => {
  const byId = (id) => document.getElementById(id);
  const all = (query, from = document) => [...from.querySelectorAll(query)];
  const read = (id) => JSON.parse(byId(id).textContent);
  const root = document.documentElement;
  const once = (make) => {
    let made;
    return () => (made ??= make());
  };
  const make = (tag, name, ...inside) => {
    const node = document.createElement(tag);
    if (name) node.className = name;
    node.append(...inside);
    return node;
  };

  // --- light and dark ---

  const dark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const paint = () => {
    const theme = chosen ?? (dark.matches ? "dark" : "light");
    root.dataset.theme = theme;
    byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
    byId("theme").setAttribute("aria-label", `Change to ${theme === "dark" ? "light" : "dark"} colours`);
    for (const plot of drawn) {
      if (plot.offsetParent) {
        draw(plot);
      } else { // in another condition: drawn when it is shown, at the size that it has then
        drawn.delete(plot);
        near.observe(plot);
      }
    }
  };
  const drawn = new Set();
  dark.addEventListener("change", paint);
  byId("theme").addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    paint();
  });

  // --- plots: drawn when they come near ---

  const figures = once(() => read("figures"));
  const plotly = once(() => {
    const script = document.createElement("script");
    script.textContent = byId("plotly").textContent;
    document.head.append(script);
    return window.Plotly;
  });
  const coloured = (value, style) => {
    if (typeof value === "string") {
      return value.startsWith("var(--") ? style.getPropertyValue(value.slice(4, -1)).trim() : value;
    }
    if (Array.isArray(value)) return value.map((one) => coloured(one, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, coloured(one, style)]));
    }
    return value;
  };
  const axis = (own) => ({
    gridcolor: "var(--line)", linecolor: "var(--faint)", zerolinecolor: "var(--line)",
    automargin: true, ...own, title: { standoff: 8, ...own?.title },
  });
  const draw = (plot) => {
    const figure = figures()[plot.dataset.figure];
    const small = plot.clientWidth < 560;
    const layout = {
      ...figure.layout,
      xaxis: axis(figure.layout.xaxis), yaxis: axis(figure.layout.yaxis),
      height: figure.height,
      margin: { l: small ? 44 : 60, r: 12, t: 12, b: 44 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: small ? 11 : 13, color: "var(--ink)" },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal" },
      showlegend: figure.data.length > 1,
      hoverlabel: { bgcolor: "var(--panel)", bordercolor: "var(--faint)", font: { color: "var(--ink)" }, align: "left" },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      hovermode: "closest",
    };
    const style = getComputedStyle(root);
    drawn.add(plot);
    const drawing = plotly().react(plot, coloured(figure.data, style), coloured(layout, style), {
      displayModeBar: false, responsive: true,
    });
    plot.querySelector(".still")?.remove(); // what stood there until now; it goes in the same frame
    return drawing.then(() => { plot.dataset.drawn = root.dataset.theme; });
  };
  const tryToDraw = (plot) => Promise.resolve().then(() => draw(plot)).catch((problem) => {
    if (!plot.querySelector(".still")) {
      plot.textContent = "This plot could not be drawn here; its figures are in the table below.";
    }
    console.error(problem);
  });
  const near = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      near.unobserve(target);
      setTimeout(() => tryToDraw(target));
    }
  }, { rootMargin: "150px" });

  // --- conditions ---

  const scene = () => Number(byId("scene")?.value ?? 0);
  const setScene = () => {
    for (const node of all("[data-scene]")) node.hidden = Number(node.dataset.scene) !== scene();
    if (listed) startList();
  };
  byId("scene")?.addEventListener("change", setScene);

  // --- the table ---

  const rows = all("#rows tbody tr");
  const showRows = () => {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word))
        || (byId("only-flagged").checked && !row.classList.contains("flagged"));
      shown += !row.hidden;
    }
    byId("table-count").textContent = `${shown} of ${rows.length} rows`;
  };
  byId("filter").addEventListener("input", showRows);
  byId("only-flagged").addEventListener("change", showRows);
  const compare = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === ""); // nothing comes last either way
    return Number.isNaN(Number(a)) || Number.isNaN(Number(b)) ? a.localeCompare(b) : a - b;
  };
  all("#rows thead th[aria-sort]").forEach((head, column) => {
    head.firstElementChild.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of all("#rows thead th[aria-sort]")) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (row) => row.children[column].dataset.v;
      const sorted = [...rows].sort((a, b) => {
        const [one, other] = [value(a), value(b)];
        return one === "" || other === "" || up ? compare(one, other) : compare(other, one);
      });
      rows[0].parentNode.append(...sorted);
    });
  });

  // --- what cannot be seen in a text, made visible ---

  const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff]|[\u{e0000}-\u{e0fff}]/gu;
  const visible = (character) => {
    const code = character.codePointAt(0);
    const shown = code < 0x20 ? String.fromCodePoint(0x2400 + code)
      : code === 0x7f ? "\u2421" : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
    const node = make("span", "ctl", shown);
    node.title = `U+${code.toString(16).toUpperCase().padStart(4, "0")}, a character that shows nothing`;
    return node;
  };
  const put = (node, text) => {
    let from = 0;
    for (const found of text.matchAll(HIDDEN)) {
      node.append(text.slice(from, found.index), visible(found[0]));
      from = found.index + found[0].length;
    }
    node.append(text.slice(from));
    return node;
  };

  // --- outputs side by side ---

  const PAGE = 20;
  const BLOCK = 40;
  const indexes = once(() => read("indexes"));
  const blocks = new Map();
  const entryOf = (place, number) => {
    const id = `texts-${place}-${Math.floor(number / BLOCK)}`;
    if (!blocks.has(id)) blocks.set(id, read(id));
    return blocks.get(id)[number % BLOCK];
  };
  let listed = false;
  let order = [];
  let shown = 0;
  let inScene = 0;

  const startList = () => {
    listed = true;
    inScene = scene();
    const index = indexes()[inScene];
    const options = index.arms.map((name, i) => {
      const option = make("option", "", name);
      option.value = i;
      return option;
    });
    byId("arm").replaceChildren(...options);
    byId("arm").value = index.first;
    byId("pieces-note").hidden = index.pieces || index.prompts.length === 0;
    list();
  };
  const arm = () => Number(byId("arm").value);
  const list = () => {
    const index = indexes()[inScene];
    const find = byId("find").value.toLowerCase();
    const ratio = (i) => index.prompts[i][3][arm()];
    const first = (i) => index.prompts[i][4][arm()]?.[2] ?? Infinity;
    order = index.prompts.map((_, i) => i).filter((i) => {
      const [id, , category] = index.prompts[i];
      return `${id} ${category ?? ""}`.toLowerCase().includes(find)
        && (!byId("only-different").checked || first(i) !== Infinity);
    });
    const by = { slow: (i) => ratio(i) ?? Infinity, fast: (i) => -(ratio(i) ?? -Infinity), early: first }[byId("order").value];
    if (by) order.sort((a, b) => { const [x, y] = [by(a), by(b)]; return x === y ? a - b : x < y ? -1 : 1; });
    shown = 0;
    byId("list").replaceChildren();
    byId("prompt-count").textContent = `${order.length} of ${index.prompts.length} prompts`;
    more();
  };
  const more = () => {
    byId("list").append(...order.slice(shown, shown + PAGE).map(item));
    shown = Math.min(order.length, shown + PAGE);
    byId("more").hidden = shown >= order.length;
    byId("more").textContent = `Show more prompts (${order.length - shown} left)`;
  };
  const said = (parity) => {
    if (!parity) return make("span", "meta", indexes()[inScene].baseline ? "outputs not compared" : "");
    const [compared, identical, position] = parity;
    if (position === null) return make("span", "meta", "same output");
    const times = compared > 1 ? `, ${compared - identical} of ${compared} times` : "";
    return make("span", "differs", `differs from token ${position + 1}${times}`);
  };
  const item = (number) => {
    const [id, turn, category, ratios, parities] = indexes()[inScene].prompts[number];
    const [place, which] = [inScene, arm()];
    const summary = make("summary", "", make("span", "id", id));
    if (turn) summary.append(make("span", "meta", `turn ${turn + 1}`));
    if (category !== null) summary.append(make("span", "meta", category));
    summary.append(said(parities[which]));
    const ratio = ratios[which];
    summary.append(make("span", "ratio", ratio === null ? "" : `${ratio.toFixed(2)}x`));
    const details = make("details", "item", summary);
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) details.append(inside(place, number, which));
    });
    return details;
  };
  const inside = (place, number, which) => {
    const index = indexes()[place];
    const entry = entryOf(place, number);
    const box = make("div", "inside");
    entry.q.forEach((text, i) => {
      const name = entry.q.length > 1 ? `Prompt, turn ${i + 1}` : "Prompt";
      box.append(make("div", "asked", make("h4", "", name), region(put(make("div", "text"), text), name)));
    });
    const own = entry.A[which];
    if (!own) {
      box.append(make("p", "absent", "This set-up did not answer this prompt."));
      return box;
    }
    const base = own.b === undefined ? null : entry.B[own.b];
    const text = (answer) => (answer?.t === undefined ? null : entry.T[answer.t]);
    const at = base && text(base) !== null && text(own) !== null ? parting(text(base), text(own)) : null;
    const times = own.w ? ` (repeat ${own.w[0] + 1}, pass ${own.w[1] + 1})` : "";
    const pair = make("div", "pair");
    if (base) pair.append(answerBox(`${index.baseline}${times}`, base, text(base), at));
    pair.append(answerBox(`${index.arms[which]}${times}`, own, text(own), at));
    box.append(pair);
    return box;
  };
  const region = (node, name) => {
    node.tabIndex = 0;
    node.setAttribute("role", "region");
    node.setAttribute("aria-label", name);
    node.dir = "auto";
    return node;
  };
  const parting = (one, other) => {
    if (one === other) return null;
    let at = 0;
    while (at < one.length && one[at] === other[at]) at += 1;
    const half = /[\ud800-\udbff]/.test(one[at - 1] ?? "") && at > 0;
    return half ? at - 1 : at;
  };
  const tell = (piece, answer, i) => {
    if (!answer.a) {
      piece.title = i ? "read at once" : "the first token";
      return;
    }
    const [took, tried] = [answer.a[i], Array.isArray(answer.d) ? answer.d[i] : answer.d];
    const steps = answer.s ? answer.s[i] : Number(i > 0);
    const what = steps === 1 ? "one step" : `${steps} steps that arrived together`;
    const begins = i ? "" : steps ? "the prefill's token and " : "the prefill's token";
    if (!steps) {
      piece.title = begins;
    } else if (tried === null) {
      piece.title = `${begins}${what}: nothing drafted, or nothing accepted`;
    } else if (!tried) {
      piece.title = `${begins}${what}: nothing drafted`;
    } else {
      piece.title = `${begins}${what}: ${took} of ${tried} drafted tokens accepted`;
      piece.classList.add("told");
      piece.style.setProperty("--took", `${(100 * took) / tried}%`);
      piece.dataset.n = `${took}/${tried}`;
    }
  };
  const answerBox = (name, answer, text, at) => {
    const facts = [];
    if (answer.n !== undefined && answer.n !== null) facts.push(`${answer.n} tokens`);
    if (answer.ms) facts.push(`first after ${Math.round(answer.ms[0])} ms`, `all after ${(answer.ms[1] / 1000).toFixed(2)} s`);
    if (answer.x?.[0]) facts.push(`${answer.x[0]} drafts, ${answer.x[1]} of ${answer.x[2] ?? "an unknown number of"} tokens accepted`);
    const box = make("div", "", make("h4", "", name), make("p", "soft", facts.join(" · ")));
    if (answer.e) box.append(put(make("p", "warn"), `Failed: ${answer.e}`));
    if (text === null) {
      box.append(make("p", "absent", "No answer was measured."));
      return box;
    }
    const node = make("div", "text");
    let from = 0;
    (answer.l ?? [text.length]).forEach((length, i) => {
      const piece = answer.l ? make("span", `step ${i % 2 ? "odd" : "even"}`) : node;
      if (answer.l) tell(piece, answer, i);
      putParting(piece, text, from, from + length, at);
      if (piece !== node && length) node.append(piece);
      from += length;
    });
    if (at !== null && at >= text.length) node.append(make("span", "first", "first difference: ends here"));
    box.append(region(node, `Answer of ${name}`));
    return box;
  };
  const putParting = (node, text, from, to, at) => {
    if (at === null || at < from || at >= to) return put(node, text.slice(from, to));
    const end = at + String.fromCodePoint(text.codePointAt(at)).length;
    put(node, text.slice(from, at));
    node.append(make("span", "first", "first difference"), put(make("mark"), text.slice(at, end)));
    return put(node, text.slice(end, to));
  };
  for (const id of ["arm", "order", "only-different"]) byId(id).addEventListener("change", list);
  byId("find").addEventListener("input", list);
  byId("more").addEventListener("click", more);
  byId("counts").addEventListener("change", () => byId("list").classList.toggle("counted", byId("counts").checked));

  // --- begin: the answer first, then what is asked for ---

  paint();
  const begin = () => {
    for (const plot of all(".plot")) near.observe(plot);
    const here = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting) && !listed) startList();
    }, { rootMargin: "600px" });
    here.observe(byId("prompts"));
  };
  addEventListener("DOMContentLoaded", () => requestAnimationFrame(() => setTimeout(begin)));
})();
