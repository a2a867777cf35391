// Builds the four animations from one object of numbers: those of this run, or of an example.
(() => {
  const { stage } = window.dws;
  const { html } = stage;

  function figure(article) {
    const canvas = html("div", { class: "canvas" }), controls = html("div", { class: "controls" });
    const said = html("p", { class: "said", "aria-live": "polite" });
    const element = html("div", { class: "scene" }, canvas, said, controls);
    article.querySelector(".scene")?.remove();
    article.append(element);
    return { element, stage: canvas, controls, say: (text) => said.replaceChildren(text) };
  }

  function build(root, facts, scene) {
    for (const article of root.querySelectorAll("[data-scene]")) {
      stage.figures[article.dataset.scene](figure(article), facts, scene);
    }
  }

  function choice(root, scene) {
    const box = root.querySelector(".whose");
    const named = (facts, at) => (scene.measured && at === 0 ? `this run: ${facts.label}` : `an example: ${facts.label}`);
    const buttons = scene.facts.map((facts, at) => {
      const button = html("button", { type: "button", "aria-pressed": String(at === 0) }, named(facts, at));
      button.addEventListener("click", () => {
        buttons.forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
        build(root, facts, scene);
      });
      return button;
    });
    box.replaceChildren("Numbers of ", ...buttons);
  }

  /** `scene` comes from `scene()` in views.py. */
  window.dws.explain = (root, scene) => {
    choice(root, scene);
    build(root, scene.facts[0], scene);
  };
})();
