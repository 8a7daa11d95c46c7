// Functions that all parts of the page share.

export const $ = (id) => document.getElementById(id);

/** An element with text in it; whatever comes from the server is text, never HTML. */
export function element(name, text = "", className = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

/** Tells a screen reader a message. */
export const tell = (message) => ($("status").textContent = message);

/** Seconds that the server took for a text. */
export const seconds = (stats) => (stats.encode_seconds + stats.decode_seconds).toFixed(2);

/** A number with a minus sign if it is below 0 after rounding. */
export function signed(number, digits = 2) {
  const text = Math.abs(number).toFixed(digits);
  return number < 0 && Number(text) ? `−${text}` : text;
}
