// The source of the views in an exported folder: its data.js.
window.dws = window.dws || {};
(() => {
  const data = window.DWS;
  async function unpack(text) {
    if (text === undefined) throw new Error("This moment is not part of the exported folder.");
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }
  window.dws.source = {
    moments: () => data.moments,
    versions: () => data.versions,
    frame: (version) => unpack(data.frames[version]),
    inside: (version) => unpack(data.inside[version]),
    bucket: (page) => unpack(data.bucket[page]),
    delta: (version) => unpack(data.deltas[version]),
    explain: async () => data.explain,
  };
})();
