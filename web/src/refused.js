/** Something that came from a bucket is refused; the message is a sentence for people. */
export class Refused extends Error {
  name = "Refused";
}

/**
 * @param {unknown} holds
 * @param {string} sentence said if it does not hold
 * @returns {asserts holds}
 */
export function demand(holds, sentence) {
  if (!holds) throw new Refused(sentence);
}

/**
 * Text from a file as a part of a sentence: in one line, and short.
 * @param {unknown} text
 */
export function quoted(text) {
  const plain = JSON.stringify(text) ?? "nothing";
  const shown = plain.replace(/[^\x20-\x7e]/g, "?");
  return shown.length > 80 ? `${shown.slice(0, 80)}…` : shown;
}
