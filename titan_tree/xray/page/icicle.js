// The tree on a canvas: depth in tokens to the right, leaves downwards. The area of a box is what training every leaf
// alone computes; a tree computes it once. Only boxes that own a pixel are drawn, so the cost of a frame follows the
// size of the canvas.

import { inkOn, labelColour } from "./colours.js";

const RULER = 22; // pixels
const LINE = 15;
const MAX_LABELS = 700; // lines of text in a frame
const MAX_ROW = 180; // pixels of a leaf, at most

export class Icicle {
  constructor(canvas, onHover, onPin) {
    Object.assign(this, {
      canvas,
      onHover,
      onPin,
      context: canvas.getContext("2d"),
      hovered: -1,
      pinned: -1,
    });
    new ResizeObserver(() => this.resize()).observe(canvas);
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointerleave", () => this.hover(-1));
    canvas.addEventListener("dblclick", (event) => this.zoomTo(this.at(event)));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  show(tree, style) {
    const isNew = tree !== this.tree;
    Object.assign(this, { tree }, style);
    if (isNew) {
      this.hovered = this.pinned = -1;
      this.fit();
    }
    this.redraw();
  }

  resize() {
    const { clientWidth, clientHeight } = this.canvas;
    const wasFit = this.isFit;
    this.ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(clientWidth * this.ratio);
    this.canvas.height = Math.round(clientHeight * this.ratio);
    [this.width, this.height] = [clientWidth, clientHeight - RULER];
    if (this.tree) wasFit || !this.scaleX ? this.fit() : this.zoom(1, 1, 0, 0);
  }

  // The view: x pixels = (token - left) * scaleX, y pixels = (row - top) * scaleY, below the ruler.
  get smallest() {
    return [this.width / this.tree.longest, Math.min(this.height / this.tree.rows, MAX_ROW)];
  }

  get isFit() {
    return this.scaleX === this.fitted?.[0] && this.scaleY === this.fitted?.[1];
  }

  fit() {
    [this.left, this.top] = [0, 0];
    this.fitted = [this.scaleX, this.scaleY] = this.smallest;
    this.redraw();
  }

  // Zooms about a point, in pixels of the drawing.
  zoom(factorX, factorY, x, y) {
    const [leastX, leastY] = this.smallest;
    const limit = (scale, least, most) => Math.min(Math.max(scale, least), Math.max(least, most));
    const [token, row] = [this.left + x / this.scaleX, this.top + y / this.scaleY];
    this.scaleX = limit(this.scaleX * factorX, leastX, 24);
    this.scaleY = limit(this.scaleY * factorY, leastY, MAX_ROW);
    this.moveTo(token - x / this.scaleX, row - y / this.scaleY);
  }

  zoomBy(factor) {
    this.zoom(factor, factor, this.width / 2, this.height / 2);
  }

  moveTo(left, top) {
    const limit = (x, most) => Math.min(Math.max(x, 0), Math.max(most, 0));
    this.left = limit(left, this.tree.longest - this.width / this.scaleX);
    this.top = limit(top, this.tree.rows - this.height / this.scaleY);
    this.redraw();
  }

  // Shows a segment and all that follows it.
  zoomTo(i) {
    if (i < 0) return this.fit();
    const { tree } = this;
    let last = 0;
    for (let k = i; k < tree.end[i]; k++) last = Math.max(last, tree.depth[k] + tree.tokens[k]);
    const [leastX, leastY] = this.smallest;
    this.scaleX = Math.min(Math.max((0.92 * this.width) / (last - tree.depth[i]), leastX), 24);
    this.scaleY = Math.min(Math.max((0.92 * this.height) / (tree.rowEnd[i] - tree.row[i]), leastY), MAX_ROW);
    const middle = (tree.row[i] + tree.rowEnd[i]) / 2;
    this.moveTo(tree.depth[i] - (0.04 * this.width) / this.scaleX, middle - this.height / 2 / this.scaleY);
  }

  pin(i) {
    this.pinned = i;
    this.redraw();
    this.onPin(i);
  }

  // Pins a segment and shows it with what surrounds it.
  jump(i) {
    this.zoomTo(this.tree.parent[i] < 0 ? i : this.tree.parent[i]);
    const edge = this.left + (0.7 * this.width) / this.scaleX; // a long parent must not push the segment out of view
    if (this.tree.depth[i] > edge)
      this.moveTo(this.tree.depth[i] - (0.3 * this.width) / this.scaleX, this.top);
    this.pin(i);
  }

  // Pointer and keys.
  point(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top - RULER];
  }

  at(event) {
    if (!this.tree) return -1;
    const { tree } = this;
    const [x, y] = this.point(event);
    const [token, row] = [this.left + x / this.scaleX, Math.floor(this.top + y / this.scaleY)];
    if (y < 0 || row >= tree.rows) return -1;
    for (let i = 0; i < tree.n;) {
      if (row < tree.row[i] || row >= tree.rowEnd[i]) i = tree.end[i];
      else if (token < tree.depth[i] + tree.tokens[i]) return token >= tree.depth[i] ? i : -1;
      else i++;
    }
    return -1;
  }

  wheel(event) {
    event.preventDefault();
    const [x, y] = this.point(event);
    const factor = Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.002));
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY))
      this.moveTo(this.left + event.deltaX / this.scaleX, this.top);
    else this.zoom(event.altKey ? 1 : factor, event.shiftKey ? 1 : factor, x, y);
  }

  press(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.drag = { from: this.point(event), left: this.left, top: this.top, moved: false };
  }

  move(event) {
    if (!this.drag) return this.hover(this.at(event), event);
    const [x, y] = this.point(event);
    const [dx, dy] = [x - this.drag.from[0], y - this.drag.from[1]];
    this.drag.moved ||= Math.abs(dx) + Math.abs(dy) > 3;
    if (!this.drag.moved) return;
    this.hover(-1);
    this.moveTo(this.drag.left - dx / this.scaleX, this.drag.top - dy / this.scaleY);
  }

  release(event) {
    if (this.drag && !this.drag.moved) this.pin(this.at(event));
    this.drag = null;
  }

  hover(i, event) {
    if (i !== this.hovered) this.redraw();
    this.hovered = i;
    this.onHover(i, event);
  }

  key(event) {
    const { tree, pinned } = this;
    const siblings = pinned < 0 ? [] : tree.children(tree.parent[pinned]);
    const place = siblings.indexOf(pinned);
    const targets = {
      ArrowLeft: tree.parent[pinned],
      ArrowRight: tree.children(pinned)[0],
      ArrowUp: siblings[place - 1],
      ArrowDown: siblings[place + 1],
    };
    const actions = {
      "+": () => this.zoomBy(1.4),
      "=": () => this.zoomBy(1.4),
      "-": () => this.zoomBy(1 / 1.4),
      0: () => this.fit(),
      Escape: () => this.pin(-1),
      Enter: () => this.zoomTo(pinned),
    };
    if (event.ctrlKey || event.metaKey || !(event.key in targets || event.key in actions)) return;
    event.preventDefault();
    if (event.key in actions) actions[event.key]();
    else if (targets[event.key] >= 0) {
      this.pin(targets[event.key]);
      this.reveal(targets[event.key]);
    }
  }

  reveal(i) {
    const { tree, left, top } = this;
    const [right, bottom] = [left + this.width / this.scaleX, top + this.height / this.scaleY];
    const seen =
      tree.depth[i] < right &&
      tree.depth[i] + tree.tokens[i] > left &&
      tree.row[i] < bottom &&
      tree.rowEnd[i] > top;
    if (!seen)
      this.moveTo(tree.depth[i] - (right - left) / 3, (tree.row[i] + tree.rowEnd[i] - (bottom - top)) / 2);
  }

  // Drawing.
  redraw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      if (this.tree && this.width > 0) this.draw();
    });
  }

  draw() {
    const { context, tree, width, height, scaleX, scaleY } = this;
    const ink = getComputedStyle(this.canvas);
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, width, height + RULER);
    this.drawRuler(ink);
    context.save();
    context.beginPath();
    context.rect(0, RULER, width, height);
    context.clip();
    context.translate(0, RULER);
    const path = new Set(tree.pathTo(this.hovered >= 0 ? this.hovered : this.pinned));
    this.boxes = [];
    this.drawn = 0;
    const [right, bottom] = [this.left + width / scaleX, this.top + height / scaleY];
    for (let i = 0; i < tree.n;) {
      const y0 = Math.round((tree.row[i] - this.top) * scaleY);
      const y1 = Math.round((tree.rowEnd[i] - this.top) * scaleY);
      if (y0 >= y1 || tree.row[i] >= bottom || tree.rowEnd[i] <= this.top || tree.depth[i] >= right) {
        i = tree.end[i]; // nothing of the subtree owns a pixel
        continue;
      }
      const x0 = Math.round((tree.depth[i] - this.left) * scaleX);
      const x1 = Math.round((tree.depth[i] + tree.tokens[i] - this.left) * scaleX);
      if (x0 < x1 && x1 > 0) this.drawBox(i, x0, y0, x1, y1, path.has(i));
      i++;
    }
    this.drawOverlay();
    this.drawLabels();
    this.outline(this.pinned, ink.getPropertyValue("--accent"), 2.5);
    if (this.hovered !== this.pinned) this.outline(this.hovered, ink.getPropertyValue("--ink"), 1.5);
    context.restore();
  }

  drawBox(i, x0, y0, x1, y1, isOnPath) {
    const { context } = this;
    const [gapX, gapY] = [x1 - x0 > 4 ? 1 : 0, y1 - y0 > 4 ? 1 : 0];
    context.fillStyle = this.colours[i];
    context.fillRect(x0, y0, x1 - x0 - gapX, y1 - y0 - gapY);
    if (isOnPath) {
      context.fillStyle = "#f2a93b";
      context.fillRect(x0, y0, x1 - x0 - gapX, Math.min(3, y1 - y0 - gapY));
    }
    this.drawn++;
    const seen = [Math.max(x0, 0), Math.max(y0, 0), x1, Math.min(y1, this.height)];
    if (x1 - seen[0] > 44 && y1 - y0 >= LINE) this.boxes.push([i, ...seen]);
  }

  drawLabels() {
    const { context } = this;
    context.font = "11.5px " + getComputedStyle(document.body).fontFamily;
    context.textBaseline = "top";
    const letter = context.measureText("abcdefghij klmnop").width / 17;
    let lines = MAX_LABELS;
    for (const [i, x0, y0, x1, y1] of this.boxes) {
      const letters = Math.floor((x1 - x0 - 10) / letter);
      const room = letters < 9 ? 1 : Math.min(Math.floor((y1 - y0 - 3) / LINE), 40); // words do not fit into narrow boxes
      if (lines < 1) continue;
      context.save();
      context.beginPath();
      context.rect(x0, y0, x1 - x0 - 3, y1 - y0 - 1);
      context.clip();
      context.fillStyle = inkOn(this.colours[i]);
      const rows = wrap(this.label(i), letters, room);
      rows.forEach((text, k) => {
        context.globalAlpha = k ? 0.75 : 0.95;
        context.fillText(text, x0 + 5, y0 + 4 + k * LINE);
      });
      lines -= rows.length;
      context.restore();
    }
  }

  // Partitions or ranks: a bar at the lower edge of the tokens of each, and a line where one begins.
  drawOverlay() {
    const { context, tree, scaleX, scaleY } = this;
    const last = new Map(); // segment -> the number at its end
    for (const [i, first, end, number] of this.overlay) {
      const isStart = first > 0 || (tree.parent[i] >= 0 && last.get(tree.parent[i]) !== number);
      last.set(i, number);
      const [x0, x1] = [first, end].map((token) => Math.round((tree.depth[i] + token - this.left) * scaleX));
      const [y0, y1] = [tree.row[i], tree.rowEnd[i]].map((row) => Math.round((row - this.top) * scaleY));
      if (x0 >= x1 || y0 >= y1 || x1 < 0 || x0 > this.width || y1 < 0 || y0 > this.height) continue;
      const bar = Math.min(6, (y1 - y0) / 2);
      context.fillStyle = labelColour(number);
      context.fillRect(x0, y1 - 1 - bar, x1 - x0, bar);
      if (isStart) context.fillRect(x0 - 1, y0, 2, y1 - y0 - 1);
    }
  }

  drawRuler(ink) {
    const { context, scaleX } = this;
    const step = niceStep(110 / scaleX);
    context.fillStyle = context.strokeStyle = ink.getPropertyValue("--faint");
    context.font = "11px " + getComputedStyle(document.body).fontFamily;
    context.textBaseline = "middle";
    for (let t = Math.ceil(this.left / step) * step; (t - this.left) * scaleX < this.width; t += step) {
      const x = Math.round((t - this.left) * scaleX);
      context.fillRect(x, RULER - 6, 1, 6);
      context.fillText(t ? t.toLocaleString("en") : `0 ${this.unit}`, x + 4, RULER - 10);
    }
  }

  outline(i, colour, width) {
    if (i < 0) return;
    const { context, tree } = this;
    const x0 = (tree.depth[i] - this.left) * this.scaleX;
    const y0 = (tree.row[i] - this.top) * this.scaleY;
    context.strokeStyle = colour;
    context.lineWidth = width;
    const size = [tree.tokens[i] * this.scaleX, (tree.rowEnd[i] - tree.row[i]) * this.scaleY].map((x) =>
      Math.max(x - 1, 2),
    );
    context.strokeRect(x0, y0, ...size);
  }
}

// Cuts a text into at most so many lines of at most so many letters.
function wrap(text, letters, room) {
  const lines = [];
  let rest = text.replace(/\s+/g, " ").trim();
  while (rest && lines.length < room) {
    let cut = rest.length <= letters ? rest.length : rest.lastIndexOf(" ", letters);
    if (cut < letters / 2) cut = letters;
    const isLast = lines.length === room - 1 && cut < rest.length;
    lines.push(isLast ? rest.slice(0, letters - 1) + "…" : rest.slice(0, cut));
    rest = rest.slice(cut).trimStart();
  }
  return lines;
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return Math.max(
    1,
    [1, 2, 5, 10].map((x) => x * power).find((x) => x >= least),
  );
}
