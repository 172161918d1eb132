// The script of a timeline's page: draws the visible part of the columns in #data and shows tooltips.
// Units: ticks for time (data.tick seconds each), pixels of the page for everything on the canvas.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const [frame, canvas, space, tip, said] = ["frame", "canvas", "space", "tip", "said"].map((id) => document.getElementById(id));
  const pen = canvas.getContext("2d");
  const AXIS = 24, HEAD = 26, LEFT = 76, RIGHT = 92;
  const BARS = [5, 7, 9, 12, 16, 20, 26, 34, 46, 62, 84];
  const NAMES = { F: "forward", C: "forward", B: "backward", I: "backward", W: "weight", U: "update", A: "reduce", S: "send", T: "send", N: "send", H: "send", D: "send", G: "send", Q: "send" };
  const kindsOf = (wanted) => Object.keys(NAMES).filter((kind) => wanted(NAMES[kind])).join("");
  const SENDS = kindsOf((name) => name === "send"), BUSY = kindsOf((name) => name !== "send");
  const SHADED = kindsOf((name) => ["forward", "backward", "weight"].includes(name));
  const end = Math.max(1, ...data.panels.map((panel) => panel.length));
  const peak = Math.max(0, ...data.panels.flatMap((panel) => panel.memory.map((memory) => memory.peak)));
  let remembered = true, view = { from: 0, to: end }, size = BARS.indexOf(26), bands = [], height = 0;
  let chosen = null, pointer = null, drag = null, pending = false, colors = {}, hatch = null;

  // ---- Reading -----------------------------------------------------------------------------------------------------
  const summed = (steps) => { let at = 0; return Float64Array.from(steps, (step) => (at += step)); };

  /** Spans of one sort, ascending by start; `reach[i]` is the last stop of the spans up to i, to search in. */
  function sorted(row, wanted) {
    const own = row.spans.filter((span) => wanted.includes(span.kind));
    let last = -Infinity;
    return { spans: own, reach: own.map((span) => (last = Math.max(last, span.stop))) };
  }
  for (const panel of data.panels) {
    panel.rows.forEach((row, rank) => {
      const starts = summed(row.starts), many = Array.isArray(row.stages);
      const stages = [...new Set(many ? row.stages : [row.stages])].sort((a, b) => a - b);
      row.spans = [...row.kinds].map((kind, i) => ({
        kind, rank, start: starts[i], stop: starts[i] + row.lengths[i], number: row.numbers[i],
        stage: many ? row.stages[i] : row.stages, reference: row.references[i],
        shade: stages.indexOf(many ? row.stages[i] : row.stages) % 2, size: row.sizes ? row.sizes[i] : 0,
      }));
      row.stage = stages.length === 1 && row.spans.length ? `stage ${stages[0]}` : "";
      row.busy = sorted(row, BUSY);
      row.sends = sorted(row, SENDS);
      row.waits = sorted(row, "Rtn");
    });
    for (const memory of panel.memory)
      for (const part of [memory.activations, memory.buffers]) part.at = summed(part.at);
    panel.path = panel.critical.map(([rank, index]) => panel.rows[rank].spans[index]);
    for (const span of panel.path) span.critical = true;
  }

  /** The first index from which `reach` is above `tick`. */
  function first(reach, tick) {
    let low = 0, high = reach.length;
    while (low < high) { const middle = (low + high) >> 1; if (reach[middle] > tick) high = middle; else low = middle + 1; }
    return low;
  }
  const held = (total_curve, tick) => { const i = first(total_curve.at, tick); return i ? total_curve.bytes[i - 1] : 0; };

  // ---- Words -------------------------------------------------------------------------------------------------------
  const scaled = (value, scales) => {
    const [scale, unit] = scales.find(([scale]) => value >= 0.9995 * scale) || scales[scales.length - 1];
    const number = value / scale;
    return `${number < 100 ? Number(number.toPrecision(3)) : Math.round(number)} ${unit}`;
  };
  const UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]];
  const time = (ticks) => ticks === 0 ? "0" : scaled(ticks * data.tick, UNITS);
  const bytes = (count) => count === 0 ? "0" : scaled(count, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
  const moment = (ticks) => {
    const [scale, unit] = UNITS.find(([scale]) => ticks * data.tick >= scale) || UNITS[3];
    return ticks === 0 ? "0" : `${Number((ticks * data.tick / scale).toPrecision(7))} ${unit}`;
  };
  const filled = (text, span) => text.replace(/\{(\w+)\}/g, (_, name) => span[name]);
  function words(span) {
    const [what, where] = data.words[span.kind].map((text) => filled(text, span));
    return `${what}\n${where}; rank ${span.rank}\nstart ${moment(span.start)}, lasts ${time(span.stop - span.start)}`
      + (span.size ? `\n${span.size}` : "") + (span.critical ? "\non the critical path" : "");
  }

  // ---- Layout ------------------------------------------------------------------------------------------------------
  function arrange() {
    const bar = BARS[size], strip = bar < 9 ? 2 : Math.min(6, Math.round(bar / 4));
    bands = []; height = AXIS + 4;
    for (const panel of data.panels) {
      panel.top = height; height += panel.name ? HEAD : 4;
      const curve = remembered && panel.memory.length ? Math.max(4, Math.round(bar * 0.85)) : 0;
      const pitch = bar + 1 + strip + (curve ? curve + 2 : 0) + Math.max(2, Math.min(10, Math.round(bar / 3)));
      panel.rows.forEach((row, rank) => bands.push({ panel, row, rank, top: height + rank * pitch, bar, strip, curve, pitch }));
      height += panel.rows.length * pitch + 10;
    }
    space.style.height = `${Math.max(0, height - frame.clientHeight)}px`;
  }
  const width = () => Math.max(50, frame.clientWidth - LEFT - RIGHT);
  const x = (tick) => LEFT + (tick - view.from) / (view.to - view.from) * width();
  const tickAt = (px) => view.from + (px - LEFT) / width() * (view.to - view.from);

  function resize() {
    const room = innerHeight - frame.getBoundingClientRect().top - scrollY - 92;
    arrange();
    frame.style.height = `${Math.min(height + 2, Math.max(260, room))}px`;
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round(frame.clientWidth * ratio);
    canvas.height = Math.round(frame.clientHeight * ratio);
    canvas.style.width = `${frame.clientWidth}px`;
    canvas.style.height = `${frame.clientHeight}px`;
    arrange();
    draw();
  }
  function dress() {
    const style = getComputedStyle(document.documentElement);
    colors = new Proxy({}, { get: (_, name) => style.getPropertyValue(`--${name}`).trim() });
    colors = Object.fromEntries(["paper", "ink", "soft", "faint", "band", "hatch", "forward", "forward1", "backward", "backward1",
      "weight", "weight1",
      "update", "reduce", "send", "held", "activations", "buffers", "on", "on1", "critical", "halo"].map((name) => [name, colors[name]]));
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const brush = tile.getContext("2d");
    brush.fillStyle = colors.band; brush.fillRect(0, 0, 6, 6);
    brush.strokeStyle = colors.hatch; brush.lineWidth = 1.1;
    brush.beginPath();
    for (const shift of [-6, 0, 6]) { brush.moveTo(shift - 1, 7); brush.lineTo(shift + 7, -1); }
    brush.stroke();
    hatch = pen.createPattern(tile, "repeat");
    redraw();
  }

  // ---- Drawing -----------------------------------------------------------------------------------------------------
  const FONT = 'ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
  function text(words, px, py, { color = colors.ink, align = "left", points = 12, bold = "" } = {}) {
    pen.fillStyle = color; pen.textAlign = align; pen.textBaseline = "middle"; pen.font = `${bold} ${points}px ${FONT}`;
    pen.fillText(words, px, py);
  }
  function redraw() {
    if (!pending) { pending = true; requestAnimationFrame(() => { pending = false; draw(); }); }
  }
  function draw() {
    const ratio = devicePixelRatio || 1, wide = frame.clientWidth, high = frame.clientHeight, down = frame.scrollTop;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = colors.paper; pen.fillRect(0, 0, wide, high);
    const seen = bands.filter((band) => band.top + band.pitch > down && band.top < down + high);
    pen.save();
    pen.beginPath(); pen.rect(LEFT, 0, width() + 2, high); pen.clip();
    pen.translate(0, -down);
    seen.forEach(drawBand);
    data.panels.forEach(drawPath);
    pen.restore();
    pen.save(); pen.translate(0, -down);
    for (const panel of data.panels) if (panel.name) text(panel.name, LEFT, panel.top + HEAD / 2 + 1, { bold: "600", points: 13 });
    seen.forEach(drawMargins);
    pen.restore();
    drawAxis(wide, high);
  }
  function drawBand(band) {
    const { row, top, bar, strip, panel } = band, left = x(0), right = x(panel.length);
    pen.fillStyle = hatch; pen.fillRect(left, top, right - left, bar);
    const labels = [];
    each(row.busy, (span) => {
      const start = x(span.start), wide = Math.max(x(span.stop) - start, span.kind === "U" ? 2 : 0.4);
      const shaded = span.shade && SHADED.includes(span.kind);
      pen.fillStyle = colors[NAMES[span.kind] + (shaded ? "1" : "")];
      pen.fillRect(start, top, wide > 3 ? wide - 0.7 : wide, bar);
      if (wide > 8 && bar >= 12 && span.kind !== "U") labels.push([span, start, wide, shaded]);
    });
    pen.fillStyle = colors.send;
    each(row.sends, (span) => pen.fillRect(x(span.start), top + bar + 1, Math.max(x(span.stop) - x(span.start), 0.4), strip));
    const points = Math.min(13, Math.max(9, bar - 8));
    for (const [span, start, wide, shaded] of labels) {
      const label = span.kind === "A" ? "\u03a3" : String(span.number);
      const low = Math.max(start, LEFT), high = Math.min(start + wide, LEFT + width());
      if (high - low > label.length * points * 0.62 + 3)
        text(label, (low + high) / 2, top + bar / 2 + 1, { color: shaded ? colors.on1 : colors.on, align: "center", points });
    }
    if (chosen && chosen.band.panel === panel && chosen.band.rank === band.rank) outline(band, chosen.span);
    if (band.curve) drawMemory(band);
  }
  function each(list, act) {
    for (let i = first(list.reach, view.from); i < list.spans.length && list.spans[i].start <= view.to; i++) act(list.spans[i]);
  }
  function outline(band, span) {
    const start = x(span.start), sends = SENDS.includes(span.kind);
    pen.strokeStyle = colors.ink; pen.lineWidth = 2;
    pen.strokeRect(start, sends ? band.top + band.bar : band.top, Math.max(2, x(span.stop) - start), sends ? band.strip + 2 : band.bar);
  }
  function drawMemory(band) {
    const memory = band.panel.memory[band.rank], { curve } = band, bottom = band.top + band.bar + band.strip + 3 + curve;
    const from = Math.max(0, view.from), to = Math.min(band.panel.length, view.to);
    if (to <= from || peak === 0) return;
    const per = curve / peak;
    area(memory.activations, memory.held, memory.buffers, colors.buffers);
    area(memory.activations, memory.held, null, colors.activations);
    pen.fillStyle = colors.held;
    pen.fillRect(x(from), bottom - memory.held * per, x(to) - x(from), memory.held * per);
    function area(total_curve, base, more, color) {
      const moments = more ? [...window_(total_curve), ...window_(more)].sort((a, b) => a - b) : window_(total_curve);
      const total = (tick) => base + held(total_curve, tick) + (more ? held(more, tick) : 0);
      pen.fillStyle = color; pen.beginPath(); pen.moveTo(x(from), bottom);
      let level = total(from), last = x(from), most = level;
      pen.lineTo(last, bottom - level * per);
      for (const tick of moments) {
        const px = x(tick), next = total(tick);
        most = Math.max(most, level);
        if (px - last >= 0.5) { pen.lineTo(px, bottom - Math.max(level, px - last < 1 ? most : 0) * per); pen.lineTo(px, bottom - next * per); last = px; most = 0; }
        else most = Math.max(most, next);
        level = next;
      }
      pen.lineTo(last, bottom - level * per); pen.lineTo(x(to), bottom - level * per); pen.lineTo(x(to), bottom); pen.fill();
    }
    function window_(total_curve) { return Array.from(total_curve.at.subarray(first(total_curve.at, from), first(total_curve.at, to))); }
  }
  function drawPath(panel) {
    if (!panel.path.length) return;
    const band = bands.find((band) => band.panel === panel);
    const foot = (span) => band.top + span.rank * band.pitch + band.bar + (SENDS.includes(span.kind) ? band.strip + 1 : -1);
    pen.beginPath();
    panel.path.forEach((span, index) => {
      // A wait counts from the end of what it waits for, not from when its rank began to wait.
      const began = index ? Math.min(span.stop, Math.max(span.start, panel.path[index - 1].stop)) : span.start;
      const start = Math.max(-1e4, Math.min(1e5, x(began))), stop = Math.max(-1e4, Math.min(1e5, x(span.stop)));
      if (index) pen.lineTo(start, foot(span)); else pen.moveTo(start, foot(span));
      pen.lineTo(stop, foot(span));
    });
    pen.lineJoin = "round";
    const thin = band.bar < 20;
    for (const [color, line] of [[colors.halo, thin ? 3 : 5], [colors.critical, thin ? 1.5 : 2.5]]) {
      pen.strokeStyle = color; pen.lineWidth = line; pen.stroke();
    }
  }
  function drawMargins(band) {
    const small = band.pitch < 13, points = band.bar < 12 ? 10 : 12;
    const every = Math.ceil(12 / band.pitch);
    if (band.rank % every) return;
    const middle = band.top + (small ? band.pitch / 2 : Math.max(band.bar, 10) / 2), right = LEFT + width() + 8;
    text(`rank ${band.rank}`, LEFT - 8, middle, { align: "right", points });
    text(`idle ${band.row.idle}`, right, middle, { color: colors.soft, points });
    const below = middle + Math.max(12, band.bar / 2 + 2 + band.strip + band.curve / 2);
    if (below + 6 > band.top + band.pitch) return;
    if (band.row.stage && band.curve >= 10) text(band.row.stage, LEFT - 8, below, { align: "right", points: 11, color: colors.soft });
    if (band.curve >= 10) text(bytes(band.panel.memory[band.rank].peak), right, below, { color: colors.soft, points: 11 });
  }
  function drawAxis(wide, high) {
    pen.fillStyle = colors.paper; pen.fillRect(0, 0, wide, AXIS);
    const least = (view.to - view.from) * 90 / width(), power = 10 ** Math.floor(Math.log10(least * data.tick)) / data.tick;
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * (1 - 1e-9));
    const digits = (ticks) => {
      // Enough digits to distinguish neighbours, in the unit of the largest.
      const unit = UNITS.find(([scale]) => Math.abs(view.to) * data.tick >= scale) || UNITS[3];
      const places = Math.max(0, Math.min(12, Math.ceil(-Math.log10(step * data.tick / unit[0]) - 1e-9)));
      return `${(ticks * data.tick / unit[0]).toFixed(places)} ${unit[1]}`;
    };
    pen.strokeStyle = colors.faint; pen.lineWidth = 1; pen.beginPath();
    for (let index = Math.ceil(view.from / step); index * step <= view.to; index++) {
      const px = Math.round(x(index * step)) + 0.5;
      pen.moveTo(px, AXIS - 5); pen.lineTo(px, AXIS);
      text(index === 0 ? "0" : digits(index * step), px, AXIS / 2 - 2, { color: colors.soft, align: "center", points: 11 });
    }
    pen.moveTo(0, AXIS + 0.5); pen.lineTo(wide, AXIS + 0.5); pen.stroke();
    if (pointer && pointer.x >= LEFT && pointer.x <= LEFT + width()) {
      pen.strokeStyle = colors.soft; pen.setLineDash([3, 3]); pen.beginPath();
      pen.moveTo(pointer.x + 0.5, AXIS); pen.lineTo(pointer.x + 0.5, high); pen.stroke(); pen.setLineDash([]);
    }
  }

  // ---- Asking ------------------------------------------------------------------------------------------------------
  function laneAt(py) {
    const inner = py + frame.scrollTop;
    return py < AXIS ? undefined : bands.find((band) => inner >= band.top && inner < band.top + band.pitch);
  }
  function spanAt(band, px, py) {
    const within = py + frame.scrollTop - band.top, tick = tickAt(px), near = 2 * (view.to - view.from) / width();
    const find = (list) => {
      let best;
      for (let i = first(list.reach, tick - near - 1e-9); i < list.spans.length && list.spans[i].start <= tick + near; i++) {
        const span = list.spans[i], off = Math.max(0, span.start - tick, tick - span.stop);
        if (off <= near && (!best || off <= best.off)) best = { span, off };
      }
      return best && best.span;
    };
    if (within <= band.bar) return find(band.row.busy) || find(band.row.waits);
    return within <= band.bar + band.strip + 2 ? find(band.row.sends) : undefined;
  }
  function ask(px, py) {
    const band = laneAt(py);
    if (!band || px < LEFT || px > LEFT + width()) return "";
    const tick = tickAt(px);
    if (tick < 0 || tick > band.panel.length) return "";
    const span = spanAt(band, px, py), within = py + frame.scrollTop - band.top;
    if (span) return words(span);
    if (within <= band.bar) return `idle\nrank ${band.rank} at ${moment(tick)}; idle ${band.row.idle} of wall time`;
    if (band.curve && within > band.bar + band.strip) {
      const memory = band.panel.memory[band.rank], now = held(memory.activations, tick), waiting = held(memory.buffers, tick);
      return `${bytes(memory.held + now + waiting)} on rank ${band.rank} at ${moment(tick)}\n`
        + `always held ${bytes(memory.held)}, activations ${bytes(now)}, messages and gradients ${bytes(waiting)}\n${memory.words}`;
    }
    return "";
  }
  function show(words, px, py) {
    tip.hidden = !words;
    if (!words) return;
    tip.textContent = words;
    const box = tip.getBoundingClientRect(), edge = frame.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(edge.left + px + 14, innerWidth - box.width - 8))}px`;
    const below = edge.top + py + 16;
    tip.style.top = `${below + box.height > innerHeight - 4 ? Math.max(4, edge.top + py - box.height - 12) : below}px`;
  }

  // ---- Moving ------------------------------------------------------------------------------------------------------
  function look(from, to) {
    const span = Math.min(Math.max(to - from, Math.min(20, end)), end * 1.02);
    const start = Math.min(Math.max(from, -0.01 * end), 1.01 * end - span);
    view = { from: start, to: start + span };
    redraw();
  }
  function zoom(factor, px = LEFT + width() / 2) {
    const at = tickAt(px);
    look(at - (at - view.from) * factor, at + (view.to - at) * factor);
  }
  const shift = (share) => look(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));
  function grow(step) {
    size = Math.min(BARS.length - 1, Math.max(0, size + step));
    resize();
  }
  function recall() {
    remembered = !remembered;
    const button = document.getElementById("memory");
    if (button) button.setAttribute("aria-pressed", String(remembered));
    resize();
  }
  function choose(band, span) {
    if (!span) return;
    chosen = { band, span };
    if (span.start < view.from || span.stop > view.to) {
      const room = view.to - view.from;
      look((span.start + span.stop - room) / 2, (span.start + span.stop + room) / 2);
    }
    const top = band.top - AXIS - HEAD, bottom = band.top + band.pitch - frame.clientHeight;
    frame.scrollTop = Math.max(Math.min(frame.scrollTop, top), bottom);
    said.textContent = words(span);
    redraw();
    // After the scrolling, which hides it.
    requestAnimationFrame(() => show(words(span), x(Math.max(view.from, span.start)), band.top - frame.scrollTop + band.bar));
  }
  function step(way) {
    if (!chosen) return choose(bands[0], bands[0].row.busy.spans[0]);
    const own = chosen.band.row.busy.spans, index = own.indexOf(chosen.span);
    choose(chosen.band, own[Math.min(own.length - 1, Math.max(0, index + way))]);
  }
  function hop(way) {
    if (!chosen) return step(0);
    for (let index = bands.indexOf(chosen.band) + way; bands[index]; index += way) {
      const list = bands[index].row.busy;
      if (list.spans.length) return choose(bands[index], list.spans[Math.min(first(list.reach, chosen.span.start), list.spans.length - 1)]);
    }
  }
  const place = (event) => { const box = canvas.getBoundingClientRect(); return { x: event.clientX - box.left, y: event.clientY - box.top }; };
  frame.addEventListener("wheel", (event) => {
    const at = place(event), line = event.deltaMode === 1 ? 16 : 1;
    if (at.x < LEFT && !event.ctrlKey) return;  // over the ranks: the frame scrolls by itself
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) shift((event.deltaX || event.deltaY) * line / width());
    else zoom(Math.exp(event.deltaY * line * 0.0018), at.x);
    show("");
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    drag = { ...place(event), view, top: frame.scrollTop };
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("moving");
    show("");
  });
  canvas.addEventListener("pointermove", (event) => {
    pointer = place(event);
    if (drag) {
      const ticks = (drag.x - pointer.x) / width() * (drag.view.to - drag.view.from);
      look(drag.view.from + ticks, drag.view.to + ticks);
      frame.scrollTop = drag.top + drag.y - pointer.y;
    } else show(ask(pointer.x, pointer.y), pointer.x, pointer.y);
    redraw();
  });
  const release = () => { drag = null; canvas.classList.remove("moving"); };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => { pointer = null; if (!drag) show(""); redraw(); });
  canvas.addEventListener("dblclick", (event) => {
    const at = place(event), band = laneAt(at.y), span = band && spanAt(band, at.x, at.y);
    if (!span) return look(0, end);
    const room = Math.max(1, span.stop - span.start) * 4;
    look((span.start + span.stop) / 2 - room, (span.start + span.stop) / 2 + room);
  });
  const keys = {
    ArrowLeft: () => step(-1), ArrowRight: () => step(1), ArrowUp: () => hop(-1), ArrowDown: () => hop(1),
    "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), 0: () => look(0, end), Home: () => look(0, end),
    a: () => shift(-0.2), d: () => shift(0.2), "[": () => grow(-1), "]": () => grow(1),
    m: recall,
    Escape: () => { chosen = null; show(""); redraw(); },
  };
  frame.addEventListener("keydown", (event) => {
    const act = keys[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  frame.addEventListener("scroll", () => { show(""); redraw(); });
  const buttons = { out: () => zoom(1 / 0.6), in: () => zoom(0.6), all: () => look(0, end), flatter: () => grow(-1), taller: () => grow(1), memory: recall };
  for (const [id, act] of Object.entries(buttons)) document.getElementById(id)?.addEventListener("click", act);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", dress);
  addEventListener("resize", resize);

  // The tallest rows with which all are visible, but none too flat to read.
  const room = innerHeight - frame.getBoundingClientRect().top - 92;
  for (size = BARS.indexOf(34); size > BARS.indexOf(9); size--) { arrange(); if (height <= room) break; }
  dress();
  resize();
})();
