// The pixel under the pointer or, with the arrow keys, beside the last one is written into the data of
// the frames, from where it is read when it is needed.
const frames = () => [...element.querySelectorAll(".frame")];

function show(row, column) {
  for (const frame of frames()) {
    const { rows, columns } = frame.dataset, cursor = frame.querySelector(".cursor");
    Object.assign(frame.dataset, { row, column });
    cursor.style.left = `${(100 * column) / columns}%`;
    cursor.style.top = `${(100 * row) / rows}%`;
    cursor.style.width = `${100 / columns}%`;
    cursor.style.height = `${100 / rows}%`;
  }
}

function ask(frame, row, column) {
  const { rows, columns } = frame.dataset;
  row = Math.min(rows - 1, Math.max(0, row));
  column = Math.min(columns - 1, Math.max(0, column));
  if (row === Number(frame.dataset.row) && column === Number(frame.dataset.column)) return;
  show(row, column);
  trigger("select");
}

function point(event) {
  const frame = event.target.closest(".frame");
  if (!frame) return;
  const box = frame.getBoundingClientRect();
  ask(
    frame,
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
  const move = MOVES[event.key], frame = event.target.closest(".frame");
  if (!move || !frame) return;
  ask(frame, Number(frame.dataset.row) + move[0], Number(frame.dataset.column) + move[1]);
  event.preventDefault();
});

function start() {
  const [frame] = frames();
  if (frame) show(Number(frame.dataset.row), Number(frame.dataset.column));
}
watch("value", start);
start();
