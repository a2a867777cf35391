// Gives the first paint the theme of the page, and removes it when Gradio shows the page.
(() => {
  const first = document.querySelector("#dws.first");
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const theme = new URLSearchParams(location.search).get("__theme");
  document.body.classList.toggle("dark", theme ? theme === "dark" : dark);
  if (!["", "#run"].includes(location.hash)) first.remove(); // it shows the run, but the visitor opened another view
  const replace = () => (document.querySelector("#dws-live .page") ? first.remove() : requestAnimationFrame(replace));
  replace();
})();
