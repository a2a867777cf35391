// While the page's modules are still on their way: begin with the largest file of the first play, the preview of the
// recorded run. See store.js, which takes the answer up.

{
  const { bucket = "", run, first = "" } = document.documentElement.dataset;
  const other = new URLSearchParams(location.search).has("bucket") || bucket.includes("://");
  if (!other && first.startsWith(`runs/${run}/`)) {
    const { href } = new URL(`${bucket}/${first}`, location.href);
    const answer = fetch(href, { cache: "no-cache", credentials: "omit", referrerPolicy: "no-referrer" });
    answer.catch(() => {}); // store.js tries it again, and says what is wrong
    Object.assign(globalThis, { early: new Map([[href, answer]]) });
  }
}
