// While the page's modules are still on their way: begin with the largest file of the first play, the preview.
// See store.js, which takes the answers up.

{
  const { bucket = "" } = document.documentElement.dataset;
  /** @type {Map<string, Promise<Response>>} */
  const early = new Map();
  const get = (/** @type {string} */ key) => {
    const { href } = new URL(`${bucket}/${key}`, location.href);
    const answer = fetch(href, { cache: "no-cache", credentials: "omit", referrerPolicy: "no-referrer" });
    early.set(href, answer);
    return answer;
  };
  if (!new URLSearchParams(location.search).has("bucket") && !bucket.includes("://")) {
    Object.assign(globalThis, { early });
    get("keys.json").then((answer) => answer.clone().json()).then((/** @type {string[]} */ keys) => {
      const previews = keys.filter((key) => key.endsWith("/first.safetensors"));
      if (previews.length === 1) get(previews[0]).catch(() => {});
    }).catch(() => {}); // store.js tries it again, and says what is wrong
  }
}
