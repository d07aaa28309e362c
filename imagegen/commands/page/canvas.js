// Colours and visible pixels are kept apart, so that what was erased can be restored. The value is a
// PNG in which hidden pixels are clear; the others hold exactly what was drawn.
const paper = element.querySelector("canvas");
const context = paper.getContext("2d", { willReadFrequently: true, colorSpace: "srgb" });
const { width, height } = paper;
const colours = new Uint8ClampedArray(width * height * 3);
const visible = new Uint8Array(width * height).fill(1);
// What it begins with is empty, as this is, and must not come back over a first stroke.
let tool = "draw", last = null, sent = props.value, cursor = [width >> 1, height >> 1];

const get = (selector) => element.querySelector(selector);

function ink() {
  const typed = get("[data-ink]").value;
  if (!typed.startsWith("#")) return [Number(typed), Number(typed), Number(typed)];
  return [1, 3, 5].map((at) => parseInt(typed.slice(at, at + 2), 16));
}

function show() {
  const image = context.createImageData(width, height);
  for (let at = 0; at < visible.length; at++) {
    if (!visible[at]) continue;
    for (let c = 0; c < 3; c++) image.data[4 * at + c] = colours[3 * at + c];
    image.data[4 * at + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}

function send() {
  sent = paper.toDataURL("image/png");
  props.value = sent;
}

function dab(x, y) {
  const size = Number(get("[data-brush]").value), colour = ink();
  const first = (centre) => Math.round(centre - size / 2);
  for (let row = first(y); row < first(y) + size; row++) {
    for (let column = first(x); column < first(x) + size; column++) {
      if (row < 0 || column < 0 || row >= height || column >= width) continue;
      const at = row * width + column;
      visible[at] = tool === "erase" ? 0 : 1;
      if (tool === "draw") colours.set(colour, 3 * at);
    }
  }
}

function stroke(from, to) {
  const steps = Math.max(1, Math.ceil(2 * Math.hypot(to[0] - from[0], to[1] - from[1])));
  for (let step = 0; step <= steps; step++) {
    const part = step / steps;
    dab(from[0] + (to[0] - from[0]) * part, from[1] + (to[1] - from[1]) * part);
  }
  show();
}

function place(event) {
  const box = paper.getBoundingClientRect();
  return [
    ((event.clientX - box.left) / box.width) * width,
    ((event.clientY - box.top) / box.height) * height,
  ];
}

paper.addEventListener("pointerdown", (event) => {
  paper.setPointerCapture(event.pointerId);
  last = place(event);
  stroke(last, last);
  event.preventDefault();
});
paper.addEventListener("pointermove", (event) => {
  if (last === null) return;
  const now = place(event);
  stroke(last, now);
  last = now;
});
for (const name of ["pointerup", "pointercancel"]) {
  paper.addEventListener(name, () => {
    if (last !== null) send();
    last = null;
  });
}

const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
paper.addEventListener("keydown", (event) => {
  const move = MOVES[event.key];
  if (move) {
    cursor[0] = Math.min(width - 1, Math.max(0, cursor[0] + move[0]));
    cursor[1] = Math.min(height - 1, Math.max(0, cursor[1] + move[1]));
    show();
    context.fillStyle = "#e53935";
    context.fillRect(cursor[0], cursor[1], 1, 1);
  } else if (event.key === " " || event.key === "Enter") {
    stroke([cursor[0] + 0.5, cursor[1] + 0.5], [cursor[0] + 0.5, cursor[1] + 0.5]);
    send();
  } else {
    return;
  }
  event.preventDefault();
});
paper.addEventListener("blur", show);

function keep(side) {
  for (let at = 0; at < visible.length; at++) {
    const row = Math.floor(at / width), column = at % width;
    visible[at] = {
      top: row < height / 2,
      bottom: row >= height / 2,
      left: column < width / 2,
      right: column >= width / 2,
      all: true,
      nothing: false,
    }[side];
  }
}

element.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.tool) {
    tool = button.dataset.tool;
    for (const other of element.querySelectorAll("[data-tool]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    return;
  }
  if (button.dataset.keep) keep(button.dataset.keep);
  if ("clear" in button.dataset) {
    colours.fill(0);
    visible.fill(1);
  }
  show();
  send();
});

// An image that was loaded.
watch("value", () => {
  if (!props.value || props.value === sent) return;
  const image = new Image();
  image.onload = () => {
    context.clearRect(0, 0, width, height);
    context.drawImage(image, 0, 0);
    const data = context.getImageData(0, 0, width, height).data;
    for (let at = 0; at < visible.length; at++) {
      visible[at] = data[4 * at + 3] > 127 ? 1 : 0;
      for (let c = 0; c < 3; c++) colours[3 * at + c] = data[4 * at + c];
    }
    show();
    send();
  };
  image.src = props.value;
});

show();
paper.dataset.ready = "";
