// Functions that all parts of the page share.

export const $ = (id) => document.getElementById(id);

/** An element with text in it; whatever comes from the server is text, never HTML. */
export function element(name, text = "", className = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

/** Scrolls to an answer if hardly any of it is in sight. */
export function reveal(answer) {
  if (innerHeight - answer.getBoundingClientRect().top < 150) answer.scrollIntoView();
}

/** Tells a screen reader a message. */
export const tell = (message) => ($("status").textContent = message);

/** Says that a request waits; says nothing any more if there is no message. */
export function sayWaiting(message = "") {
  $("waiting").textContent = message;
  $("waiting").hidden = !message;
}

/** Seconds that the server took for a text. */
export const duration = (stats) => stats.encode_seconds + stats.decode_seconds;

/** Seconds as text, with milliseconds where it takes few. */
export const seconds = (time) => time.toFixed(time < 0.1 ? 3 : 2);

/** A number with a minus sign if it is below 0 after rounding. */
export function signed(number, digits = 2) {
  const text = Math.abs(number).toFixed(digits);
  return number < 0 && Number(text) ? `−${text}` : text;
}
