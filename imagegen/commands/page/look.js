// The pixel under the pointer or, with the arrow keys, beside the last one is asked for: once for
// each, and the newest last.
let shown = null;

const frames = () => [...element.querySelectorAll(".frame")];

function show(row, column) {
  for (const frame of frames()) {
    const { rows, columns } = frame.dataset, cursor = frame.querySelector(".cursor");
    cursor.style.left = `${(100 * column) / columns}%`;
    cursor.style.top = `${(100 * row) / rows}%`;
    cursor.style.width = `${100 / columns}%`;
    cursor.style.height = `${100 / rows}%`;
  }
}

function ask(row, column) {
  const [frame] = frames();
  if (!frame) return;
  row = Math.min(frame.dataset.rows - 1, Math.max(0, row));
  column = Math.min(frame.dataset.columns - 1, Math.max(0, column));
  if (shown && shown[0] === row && shown[1] === column) return;
  shown = [row, column];
  show(row, column);
  trigger("select", { row, column });
}

function point(event) {
  const frame = event.target.closest(".frame");
  if (!frame) return;
  const box = frame.getBoundingClientRect();
  ask(
    Math.floor(((event.clientY - box.top) / box.height) * frame.dataset.rows),
    Math.floor(((event.clientX - box.left) / box.width) * frame.dataset.columns),
  );
}

element.addEventListener("pointerdown", point);
element.addEventListener("pointermove", (event) => {
  if (event.pointerType !== "touch") point(event); // a finger that moves scrolls
});

const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
element.addEventListener("keydown", (event) => {
  const move = MOVES[event.key];
  if (!move || !shown || !event.target.closest(".frame")) return;
  ask(shown[0] + move[0], shown[1] + move[1]);
  event.preventDefault();
});

function start() {
  const [frame] = frames();
  shown = frame ? [Number(frame.dataset.row), Number(frame.dataset.column)] : null;
  if (shown) show(...shown);
}
watch("value", start);
start();
