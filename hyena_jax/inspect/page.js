"use strict";
// The controls of a page that `hyena-jax show` writes. All data are in the page; nothing is fetched.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
document.documentElement.classList.add("with-script");

// Rows of numbers: base64 of integers, and one factor for each row.
function unpack(packed) {
  const bytes = Uint8Array.from(atob(packed.bytes), (c) => c.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  const rows = packed.scales.length;
  const out = [];
  let at = 0;
  for (let r = 0; r < rows; r++) {
    const n = packed.triangle ? r + 1 : packed.columns;
    const row = new Float32Array(packed.columns);
    for (let c = 0; c < n; c++, at++) row[c] = (packed.wide ? view.getInt16(2 * at, true) : view.getInt8(at)) * packed.scales[r];
    out.push(row);
  }
  return out;
}

function show(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "none";
  if (x === 0) return "0";
  const size = Math.abs(x);
  return size >= 1e5 || size < 1e-3 ? x.toExponential(2) : String(Number(x.toPrecision(3)));
}

function element(name, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (parent) parent.appendChild(made);
  return made;
}

function ticks(low, high, isLog) {
  const found = [];
  if (isLog) {
    const step = Math.max(1, Math.ceil((high - low) / 6));
    for (let k = Math.ceil(low); k <= high + 1e-9; k += step) found.push(k);
    return found;
  }
  const raw = (high - low) / 8 || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((m) => m * power >= raw) * power;
  for (let k = Math.ceil(low / step); k * step <= high + 1e-9 * step; k++) found.push(k * step);
  return found;
}

// A chart of lines. spec: {title, series: [{name, colour, x, y, dots}], xlabel, logx, logy, zero, hint}.
function chart(host, spec) {
  const [W, H, left, right, top, bottom] = [640, 300, 62, 24, 26, 40];
  const heading = document.createElement("h3");
  heading.textContent = spec.title;
  host.replaceChildren(heading);
  const svg = element("svg", { class: "chart", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": spec.title }, host);
  const along = (value, isLog) => (isLog ? Math.log10(Math.max(value, 1e-30)) : value);
  const points = spec.series.map((s) =>
    s.x.map((x, i) => [x, s.y[i]]).filter(([x, y]) => y !== null && Number.isFinite(y) && (!spec.logx || x > 0) && (!spec.logy || y > 0)));
  const all = points.flat();
  if (!all.length) { heading.textContent += ": no values"; return; }
  const range = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  let [x0, x1] = range(all.map(([x]) => along(x, spec.logx)));
  let [y0, y1] = range(all.map(([, y]) => along(y, spec.logy)));
  if (spec.zero) [y0, y1] = [Math.min(y0, 0), Math.max(y1, 0)];
  if (spec.logy) y0 = Math.floor(y0);
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  const pad = (y1 - y0 || 1) * 0.05;
  y0 -= spec.logy || (spec.zero && y0 === 0) ? 0 : pad; y1 += pad;
  const px = (x) => left + ((along(x, spec.logx) - x0) / (x1 - x0)) * (W - left - right);
  const py = (y) => H - bottom - ((along(y, spec.logy) - y0) / (y1 - y0)) * (H - top - bottom);
  const label = (k, isLog) => (isLog ? show(10 ** k) : show(k));
  for (const k of ticks(y0, y1, spec.logy)) {
    const y = py(spec.logy ? 10 ** k : k);
    element("line", { x1: left, x2: W - right, y1: y, y2: y, class: !spec.logy && k === 0 ? "zero" : "grid" }, svg);
    element("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, svg).textContent = label(k, spec.logy);
  }
  for (const k of ticks(x0, x1, spec.logx)) {
    const x = px(spec.logx ? 10 ** k : k);
    element("text", { x, y: H - bottom + 16, "text-anchor": "middle" }, svg).textContent = label(k, spec.logx);
  }
  element("text", { x: (left + W - right) / 2, y: H - 6, "text-anchor": "middle" }, svg).textContent = spec.xlabel;
  let at = left;
  spec.series.forEach((s, i) => {
    const path = points[i].map(([x, y], j) => `${j ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
    if (!s.dots) element("path", { d: path, class: s.colour }, svg);
    if (s.dots || points[i].length < 40) for (const [x, y] of points[i]) element("circle", { cx: px(x), cy: py(y), r: 2.6, class: s.colour }, svg);
    const text = element("text", { x: at, y: 16, class: s.colour }, svg);
    text.textContent = s.name.length > 30 ? `${s.name.slice(0, 29)}…` : s.name;
    at += 14 + 6.6 * text.textContent.length;
  });
  const rule = element("line", { y1: top, y2: H - bottom, class: "zero", visibility: "hidden" }, svg);
  const readout = document.createElement("p");
  readout.className = "readout";
  const hint = spec.hint || "Move over the chart for values.";
  readout.textContent = hint;
  host.appendChild(readout);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * W;
    const near = (list) => list.reduce((best, p) => (Math.abs(px(p[0]) - x) < Math.abs(px(best[0]) - x) ? p : best));
    const shown = near(all);
    rule.setAttribute("x1", px(shown[0])); rule.setAttribute("x2", px(shown[0])); rule.setAttribute("visibility", "visible");
    const values = spec.series.map((s, i) => (points[i].length ? `${s.name} ${show(near(points[i])[1])}` : "")).filter(Boolean);
    readout.textContent = `${spec.xlabel} ${show(shown[0])}: ${values.join("; ")}`;
  });
  svg.addEventListener("pointerleave", () => { rule.setAttribute("visibility", "hidden"); readout.textContent = hint; });
}

function fill(select, names) {
  select.replaceChildren(...names.map((name, i) => new Option(name, i)));
}

// -1 blue, 0 white, 1 red; without negative values 0 white, 1 black.
function shade(value, isSigned) {
  const v = Math.max(-1, Math.min(1, value));
  if (!isSigned) { const grey = Math.round(255 * (1 - Math.max(v, 0))); return [grey, grey, grey]; }
  const fade = (to) => Math.round(255 - (255 - to) * Math.abs(v));
  return v < 0 ? [fade(33), fade(90), fade(160)] : [fade(178), fade(34), fade(30)];
}

const quoted = (label) => (label === "\n" ? "⏎" : label === " " ? "␣" : label);
const named = (i) => (data.image ? `patch ${i + 1} (row ${Math.floor(i / data.image.grid[1]) + 1}, column ${(i % data.image.grid[1]) + 1})`
  : `token ${i + 1} “${quoted(data.labels[i])}”`);

// In a mixing matrix, black stands for at least this part of a row's diagonal.
const FAINT = 0.01;

// The tokens (or numbers of patches) to the left of a matrix and below it, as many as can be read.
function axes(canvas) {
  const frame = document.createElement("div"), n = data.labels.length, step = Math.ceil(n / 40);
  frame.className = "matrix";
  canvas.replaceWith(frame);
  const [down, across] = ["down", "across"].map((name) => {
    const strip = document.createElement("div");
    strip.className = name;
    for (let i = 0; i < n; i += step) {
      const span = document.createElement("span");
      span.textContent = data.image ? i + 1 : quoted(data.labels[i]);
      span.style[name === "down" ? "top" : "left"] = `${(100 * (i + 0.5)) / n}%`;
      strip.appendChild(span);
    }
    return strip;
  });
  frame.append(down, canvas, across);
}

// The mixing matrices: two canvases and the text (or the image) shaded by one row.
function mixingSection() {
  if (!data.layers.length) return;
  const layerSelect = byId("mix-layer"), viewSelect = byId("mix-view"), besideSelect = byId("mix-beside"), relative = byId("mix-relative"), leaveOut = byId("mix-diagonal");
  const canvases = [byId("mix-own"), byId("mix-other")];
  const strip = byId("mix-strip");
  const state = { row: Math.floor(data.labels.length * 0.6), column: null, shown: [null, null], side: 0 };
  fill(layerSelect, data.layers.map((layer) => layer.name));
  canvases.forEach(axes);
  const largest = (row) => row.reduce((m, v) => Math.max(m, Math.abs(v)), 0);

  function views() {
    const layer = data.layers[layerSelect.value];
    fill(viewSelect, layer.views.map((view) => view.name));
    fill(besideSelect, layer.beside.map((view) => view.name));
    document.querySelectorAll(".thumbs figure").forEach((f) => f.classList.toggle("chosen", f.dataset.layer === layerSelect.value));
    draw();
  }
  function draw() {
    const layer = data.layers[layerSelect.value];
    [[layer.views, viewSelect], [layer.beside, besideSelect]].forEach(([list, select], side) => {
      const view = list[select.value];
      const own = unpack(view), diagonal = own.map((row, t) => row[t]);
      const rows = own.map((row, t) => (leaveOut.checked ? row.map((v, s) => (s === t ? 0 : v)) : row));
      const isSigned = rows.some((row) => row.some((v) => v < 0));
      const most = rows.reduce((m, row) => Math.max(m, largest(row)), 0) || 1;
      const canvas = canvases[side], n = rows.length;
      canvas.width = n; canvas.height = n;
      const image = new ImageData(n, n);
      const scales = rows.map((row, t) => Math.max(largest(row), FAINT * Math.abs(diagonal[t])) || 1);
      rows.forEach((row, t) => {
        const by = relative.checked ? scales[t] : most;
        row.forEach((v, s) => {
          const colour = leaveOut.checked && s === t ? [208, 220, 235] : shade(v / by, isSigned);
          image.data.set([...colour, 255], 4 * (t * n + s));
        });
      });
      canvas.getContext("2d").putImageData(image, 0, 0);
      state.shown[side] = { rows, diagonal, scales, image };
    });
    byId("mix-own-title").textContent = layer.title;
    byId("mix-other-title").textContent = layer.besideTitle;
    byId("mix-other-about").textContent = layer.besideAbout;
    choose(state.row, state.column, state.side);
  }
  function choose(row, column, side) {
    Object.assign(state, { row, column, side });
    canvases.forEach((canvas, i) => {
      const context = canvas.getContext("2d");
      context.putImageData(state.shown[i].image, 0, 0);
      context.fillStyle = "rgba(59, 110, 168, 0.35)";
      context.fillRect(0, row, canvas.width, 1);
      const { rows, diagonal } = state.shown[i], values = rows[row].slice();
      values[row] = 0;
      const order = [...values.keys()].sort((a, b) => Math.abs(values[b]) - Math.abs(values[a])).slice(0, 3).filter((s) => values[s]);
      const at = column === null || i !== side || column === row ? "" : ` From ${named(column)}: ${show(values[column])}.`;
      byId(i ? "mix-other-readout" : "mix-own-readout").textContent =
        `Row of ${named(row)}: itself ${show(diagonal[row])}; of the others most from ` +
        `${order.map((s) => `${named(s)} ${show(values[s])}`).join(", ") || "none"}.${at}`;
    });
    const { rows, scales } = state.shown[side];
    const by = scales[row];
    byId("mix-strip-title").textContent =
      `What the output at ${named(row)} reads, by the ${side ? "right" : "left"} matrix`;
    if (data.image) return drawPatches(rows[row], by);
    [...strip.children].forEach((span, s) => {
      const v = rows[row][s] / by;
      span.style.backgroundColor = v >= 0 ? `rgba(200, 68, 45, ${v})` : `rgba(59, 110, 168, ${-v})`;
      span.classList.toggle("chosen", s === row);
    });
  }
  function drawPatches(values, by) {
    const { pixels, size, grid } = data.image, canvas = byId("mix-patches"), zoom = Math.ceil(320 / size[1]);
    canvas.width = size[1] * zoom; canvas.height = size[0] * zoom;
    const context = canvas.getContext("2d"), [h, w] = [data.image.patch[0] * zoom, data.image.patch[1] * zoom];
    pixels.forEach((rgb, i) => {
      context.fillStyle = `rgb(${rgb.join(",")})`;
      context.fillRect((i % size[1]) * zoom, Math.floor(i / size[1]) * zoom, zoom, zoom);
    });
    values.forEach((value, s) => {
      const v = value / by, [x, y] = [(s % grid[1]) * w, Math.floor(s / grid[1]) * h];
      context.fillStyle = v >= 0 ? `rgba(200, 68, 45, ${0.75 * v})` : `rgba(59, 110, 168, ${-0.75 * v})`;
      context.fillRect(x, y, w, h);
      context.strokeStyle = s === state.row ? "#3b6ea8" : "rgba(128, 128, 128, 0.4)";
      context.lineWidth = s === state.row ? 4 : 1;
      context.strokeRect(x + 1, y + 1, w - 2, h - 2);
    });
  }
  const place = (canvas, event, columns, rows) => {
    const box = canvas.getBoundingClientRect();
    const bound = (v, n) => Math.max(0, Math.min(n - 1, Math.floor(v * n)));
    return [bound((event.clientY - box.top) / box.height, rows), bound((event.clientX - box.left) / box.width, columns)];
  };
  canvases.forEach((canvas, side) => {
    const follow = (event) => choose(...place(canvas, event, canvas.width, canvas.height), side);
    canvas.addEventListener("pointermove", follow);
    canvas.addEventListener("pointerdown", follow);
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!step) return;
      event.preventDefault();
      const bound = (v) => Math.max(0, Math.min(canvas.width - 1, v));
      choose(bound(state.row + step[0]), bound((state.column ?? state.row) + step[1]), side);
    });
  });
  if (data.image) {
    const canvas = byId("mix-patches"), [rows, columns] = data.image.grid;
    canvas.addEventListener("pointerdown", (event) => {
      const box = canvas.getBoundingClientRect();
      const y = Math.floor(((event.clientY - box.top) / box.height) * data.image.size[0] / data.image.patch[0]);
      const x = Math.floor(((event.clientX - box.left) / box.width) * data.image.size[1] / data.image.patch[1]);
      if (y < rows && x < columns) choose(y * columns + x, null, state.side);
    });
  } else {
    strip.replaceChildren(...data.labels.map((label, s) => {
      const span = document.createElement("span");
      span.textContent = label === "\n" ? "⏎\n" : label;
      span.addEventListener("pointerdown", () => choose(s, null, state.side));
      return span;
    }));
  }
  document.querySelectorAll(".thumbs figure").forEach((figure) =>
    figure.addEventListener("click", () => { layerSelect.value = figure.dataset.layer; views(); }));
  layerSelect.addEventListener("change", views);
  for (const control of [viewSelect, besideSelect, relative, leaveOut]) control.addEventListener("change", draw);
  views();
}

// Names and colours of the values before training, which a run that was not trained lacks, and after.
const states = (before, after) => before
  ? [["before training", "before", before], ["after", "after", after]] : [["as it is", "after", after]];

function filterSection() {
  const layers = data.filters;
  if (!layers.length) return;
  const [layerSelect, whichSelect, channelSelect, logLag] = ["filter-layer", "filter-which", "filter-channel", "filter-log"].map(byId);
  fill(layerSelect, layers.map((layer) => layer.name));
  function refill() {
    const layer = layers[layerSelect.value];
    fill(whichSelect, Array.from({ length: layer.count }, (_, i) => `${i + 1} of ${layer.count}`));
    fill(channelSelect, layer.channels.map(String));
    const away = layer.lengthsAfter.slice(0, layer.channels.length).map((length) => Math.abs(length - layer.quartilesAfter[1]));
    channelSelect.value = away.indexOf(Math.min(...away));
    draw();
  }
  function draw() {
    const layer = layers[layerSelect.value];
    const row = whichSelect.value * layer.channels.length + Number(channelSelect.value);
    const lines = (x, before, after) => states(before, after).map(
      ([name, colour, packed]) => ({ name, colour, x, y: [...unpack(packed)[row]] }));
    const lags = logLag.checked ? layer.lags.map((lag) => lag + 1) : layer.lags;
    chart(byId("filter-lags"), { series: lines(lags, layer.before, layer.after), zero: true, logx: logLag.checked,
      title: "Filter over lag: the weight of the input so many positions ago", xlabel: logLag.checked ? "lag + 1" : "lag" });
    chart(byId("filter-spectrum"), { series: lines(layer.frequencies, layer.spectrumBefore, layer.spectrumAfter),
      title: "Its spectrum: magnitude of the Fourier transform, dB", xlabel: "frequency (cycles per position)" });
    const lengths = layer.before ? `${layer.lengthsBefore[row]} lags before training, ${layer.lengthsAfter[row]} after` : `${layer.lengthsAfter[row]} lags`;
    byId("filter-length").textContent = `Effective length of this channel's filter: ${lengths}, of ${layer.length}.`;
    chart(byId("filter-hankel"), { logy: true, xlabel: "index", title: "Hankel singular values relative to the largest, median over channels of this layer",
      series: states(layer.hankelBefore, layer.hankelAfter).map(
        ([name, colour, y]) => ({ name, colour, x: y.map((_, i) => i + 1), y })) });
  }
  layerSelect.addEventListener("change", refill);
  for (const control of [whichSelect, channelSelect, logLag]) control.addEventListener("change", draw);
  refill();
}

function gateSection() {
  const layers = data.gates;
  if (!layers.length) return;
  const layerSelect = byId("gate-layer"), whichSelect = byId("gate-which"), canvas = byId("gate-canvas");
  fill(layerSelect, layers.map((layer) => layer.name));
  fill(whichSelect, layers[0].gates.map((gate) => gate.name));
  let rows, layer, gate, hint;
  function draw() {
    layer = layers[layerSelect.value];
    gate = layer.gates[whichSelect.value];
    rows = unpack(gate);
    canvas.width = rows[0].length; canvas.height = rows.length;
    const image = new ImageData(canvas.width, canvas.height);
    const [low, high] = gate.signed ? [0, 1] : rows.flatMap((row) => [...row]).reduce(
      ([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    rows.forEach((row, c) => row.forEach((v, t) => {
      const colour = shade((v - low) / (high - low || 1), gate.signed);
      image.data.set([...colour, 255], 4 * ((rows.length - 1 - c) * canvas.width + t));
    }));
    const ends = gate.signed ? "Red is 1, white 0 and blue -1" : `White is ${show(low)}, black ${show(high)}`;
    hint = `${ends}. Move over the picture for values.`;
    canvas.getContext("2d").putImageData(image, 0, 0);
    chart(byId("gate-memory"), { logy: true, xlabel: "channel, by memory length", title: "Memory length of every channel, in positions, sorted",
      series: states(layer.memoryBefore, layer.memoryAfter).map(
        ([name, colour, y]) => ({ name, colour, x: y.map((_, i) => i + 1), y })) });
    byId("gate-readout").textContent = hint;
  }
  canvas.addEventListener("pointerleave", () => { byId("gate-readout").textContent = hint; });
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const t = Math.min(canvas.width - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * canvas.width)));
    const c = Math.min(rows.length - 1, Math.max(0, rows.length - 1 - Math.floor(((event.clientY - box.top) / box.height) * rows.length)));
    byId("gate-readout").textContent =
      `${named(t)}, channel ${layer.channels[c]} (memory ${show(layer.memory[c])} tokens): ${show(rows[c][t])}`;
  });
  for (const control of [layerSelect, whichSelect]) control.addEventListener("change", draw);
  draw();
}

function lineSections() {
  for (const [id, spec] of Object.entries(data.charts)) chart(byId(id), spec);
}

mixingSection();
filterSection();
gateSection();
lineSections();
