// The tabs, the sliders, and the content of each view, which comes from `dws.source`.
(() => {
  const { dws } = window;
  const { html } = dws.stage;
  const get = async (path) => {
    const answer = await fetch(`dashboard/${path}`);
    const text = await answer.text();
    if (answer.ok) return text;
    const json = answer.headers.get("content-type")?.includes("json");
    throw new Error(json ? JSON.parse(text).error?.message ?? text : text);
  };
  const of = (view) => (version) => get(`${view}?version=${version}`);
  /** Views from a server; an exported folder has its own source. */
  const server = {
    moments: () => JSON.parse(document.querySelector("#dws-live [data-moments]")?.dataset.moments || "[]"),
    versions: () => [...Array(Number(document.querySelector("#dws-live [data-version]")?.dataset.version || 0)).keys()].map((v) => v + 1),
    frame: of("frame"), inside: of("inside"), delta: of("delta"), verify: of("verify"),
    bucket: (page) => get(`bucket?page=${page}`),
    explain: async () => JSON.parse(await get("explain")),
  };

  /** Puts the result of `asked` into `host`; drops it if something else was asked for in the meantime. */
  async function fill(host, asked) {
    const mine = (host.asked = asked);
    host.setAttribute("aria-busy", "true");
    let text;
    try {
      text = await asked;
    } catch (error) {
      text = html("p", { class: "alert", role: "alert" }, error.message || "The server does not answer.").outerHTML;
    }
    if (host.asked !== mine) return;
    host.innerHTML = text;
    host.removeAttribute("aria-busy");
  }

  class Shell {
    constructor(root, source) {
      Object.assign(this, { root, source, shownRun: undefined, explained: null });
      const refresh = dws.controls.scrubber(root, source, fill);
      const name = () => (location.hash.slice(1) in this.views ? location.hash.slice(1) : "run");
      addEventListener("hashchange", () => this.show(name()));
      this.views = Object.fromEntries([...root.querySelectorAll("[data-tab]")].map((tab) => [tab.dataset.tab, tab]));
      root.querySelector(".view-bucket").addEventListener("click", (event) => this.clicked(event));
      this.show(name());
      const moved = () => {
        refresh();
        this.follow();
      };
      moved();
      new MutationObserver(moved).observe(root.querySelector("#dws-live"), { childList: true, subtree: true, attributes: true });
    }

    show(name) {
      this.root.dataset.view = name;
      for (const [other, tab] of Object.entries(this.views)) tab.ariaCurrent = other === name ? "page" : null;
      if (name in this && this.shownRun !== undefined) this[name]();
    }

    /** Refills the open view when the run is first known, has its first measurements, or is another run. */
    follow() {
      const run = this.root.querySelector("#dws-live [data-run]")?.dataset.run;
      if (run === undefined || run === this.shownRun) return;
      this.shownRun = run;
      this.show(this.root.dataset.view);
    }

    inside() {
      dws.controls.picker(this.root.querySelector(".view-inside .pick"), this.source.versions(),
        (version) => fill(this.root.querySelector(".view-inside .filled"), this.source.inside(version)));
    }

    bucket(page = 0) {
      fill(this.root.querySelector(".view-bucket .filled"), this.source.bucket(page));
    }

    async explain() {
      const run = this.shownRun;
      if (this.explained === run) return; // keep what the visitor has set
      this.explained = run;
      const scene = await this.source.explain().catch(() => (this.explained = null)); // the next visit asks again
      if (!scene || this.explained !== run) return;
      dws.explain(this.root.querySelector(".view-explain"), scene);
    }

    clicked({ target }) {
      const { delta, page, verify } = target.dataset;
      if (page) this.bucket(Number(page));
      if (delta) this.toggle(target, Number(delta));
      if (verify) this.prove(target, Number(verify));
    }

    toggle(button, version) {
      const row = button.closest("tr"), open = button.getAttribute("aria-expanded") === "true";
      button.setAttribute("aria-expanded", String(!open));
      button.textContent = open ? "Open" : "Close";
      if (open) return row.nextElementSibling.remove();
      const cell = html("td", { colspan: "3" });
      row.after(html("tr", { class: "unfolded" }, cell));
      fill(cell, this.source.delta(version));
    }

    prove(button, version) {
      button.disabled = true;
      const output = button.parentElement.querySelector("output");
      output.textContent = "rebuilding this version from the bucket …";
      fill(output, this.source.verify(version)).then(() => (button.disabled = false));
    }
  }

  /** Waits for the last element of the views: Gradio builds its page after the scripts have run. */
  function start() {
    const last = document.querySelector(".view-explain [data-scene='sync']");
    if (last) new Shell(last.closest("#dws"), dws.source || server);
    else requestAnimationFrame(start);
  }
  start();
})();
