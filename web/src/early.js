// While the page's modules are still on their way, this script requests the largest file that the first game needs:
// the preview of the recorded run. store.js uses the answer.

{
  const { bucket = "", run, first = "" } = document.documentElement.dataset;
  const other = new URLSearchParams(location.search).has("bucket") || bucket.includes("://");
  if (!other && first.startsWith(`runs/${run}/`)) {
    const { href } = new URL(`${bucket}/${first}`, location.href);
    const answer = fetch(href, { cache: "no-cache", credentials: "omit", referrerPolicy: "no-referrer" });
    answer.catch(() => {}); // store.js tries again, and says what is wrong
    Object.assign(globalThis, { early: new Map([[href, answer]]) });
  }
}
