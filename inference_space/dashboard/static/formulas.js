// The formulas of the Explain animations. Sizes are bytes, links bytes per second, times seconds; bf16 weights are
// ordinary numbers.
window.dws = window.dws || {};
(() => {
  const MANTISSA = 7, SMALLEST = -126;
  const exponentOf = (weight) => {
    let exponent = Math.floor(Math.log2(Math.abs(weight)));
    if (2 ** exponent > Math.abs(weight)) exponent -= 1; // log2 may round up
    return exponent;
  };
  const transfer_s = (size, link) => size / link;

  // The distance from one bf16 number to the next at the magnitude of `weight`.
  function ulp(weight) {
    return 2 ** (Math.max(weight ? exponentOf(weight) : SMALLEST, SMALLEST) - MANTISSA);
  }

  // The nearest bf16 number; ties go to the one whose last bit is 0.
  function bf16(value) {
    const tick = ulp(value), at = value / tick, down = Math.floor(at), rest = at - down;
    const up = rest > 0.5 || (rest === 0.5 && down % 2 !== 0);
    return (down + (up ? 1 : 0)) * tick;
  }

  // The 16 bits of a normal bf16 number, as an integer.
  function bits(weight) {
    const exponent = exponentOf(weight);
    const mantissa = Math.round((Math.abs(weight) / 2 ** exponent - 1) * (1 << MANTISSA));
    return (weight < 0 ? 32768 : 0) + (exponent + 127) * (1 << MANTISSA) + mantissa;
  }

  // The probability that an update changes the bf16 cast of a weight whose fp32 value may be anywhere in its cell.
  const flip_chance = (weight, update) => Math.min(1, Math.abs(update) / ulp(weight));

  // The expected share of `weights` that flip when each moves by `rate` times its update.
  function flip_share(weights, updates, rate) {
    return weights.reduce((sum, w, i) => sum + flip_chance(w, rate * updates[i]), 0) / weights.length;
  }

  // The learning rate at which `share` of the weights are expected to flip: flip_share grows with the rate.
  function rate_for_share(weights, updates, share) {
    let low = 1e-9, high = 1;
    for (let halvings = 0; halvings < 60; halvings++) {
      const middle = Math.sqrt(low * high);
      if (flip_share(weights, updates, middle) < share) low = middle;
      else high = middle;
    }
    return Math.sqrt(low * high);
  }

  // All weights after every step: trainer and replicas wait for the transfer.
  // A span is: lane, activity, first second, last second.
  function broadcast_spans(facts, link, window) {
    const spans = [], wait = transfer_s(facts.full_bytes, link);
    for (let t = 0; t < window;) {
      const sent = t + facts.step_s;
      spans.push(["trainer", "train", t, sent], ["trainer", "wait", sent, sent + wait]);
      spans.push(["replica", "generate", t, sent], ["replica", "wait", sent, sent + wait]);
      spans.push(["wire", "full", sent, sent + wait]);
      t = sent + wait;
    }
    return spans;
  }

  // A delta after every step: the trainer waits for the diff, a replica for the commit.
  // While an upload is under way, later steps are merged into the next one.
  function delta_spans(facts, link, window) {
    const cycle = facts.step_s + facts.diff_s, spans = [];
    for (let step = 0; step < Math.ceil(window / cycle); step++) {
      const t = step * cycle;
      spans.push(["trainer", "train", t, t + facts.step_s], ["trainer", "wait", t + facts.step_s, t + cycle]);
    }
    let start = cycle, generating = 0;
    while (start < window) {
      const uploaded = start + facts.encode_s + transfer_s(facts.delta_bytes, link);
      const seen = uploaded + facts.poll_s / 2; // on average, half a poll interval later
      const staged = seen + transfer_s(facts.delta_bytes, link) + facts.stage_s;
      spans.push(["wire", "up", start, uploaded], ["wire", "down", seen, staged]);
      spans.push(["replica", "generate", generating, staged]);
      spans.push(["replica", "wait", staged, staged + facts.pause_s]);
      generating = staged + facts.pause_s;
      start = Math.max(uploaded, (Math.floor(start / cycle + 1e-9) + 1) * cycle);
    }
    spans.push(["replica", "generate", generating, Math.max(window, generating)]);
    return spans;
  }

  // The share of `window` that a lane spends waiting.
  function idle_share(spans, lane, window) {
    const waits = spans.filter(([at, what, a]) => at === lane && what === "wait" && a < window);
    return waits.reduce((sum, [, , a, b]) => sum + Math.min(b, window) - a, 0) / window;
  }

  // Optimizer steps that end within `window`.
  function steps_done(spans, window) {
    return spans.filter(([lane, what, , b]) => lane === "trainer" && what === "train" && b <= window).length;
  }

  // One sync through the bucket, stage by stage. All replicas fetch in parallel: each has its own link.
  function bucket_sync(facts, link) {
    const wire = transfer_s(facts.delta_bytes, link);
    return [
      ["diff", facts.diff_s], ["encode", facts.encode_s], ["upload", wire], ["poll", facts.poll_s / 2],
      ["fetch", wire], ["stage", facts.stage_s], ["commit", facts.pause_s],
    ];
  }

  // One broadcast of all weights; replicas forward them while they arrive, as NCCL does.
  const broadcast_sync = (facts, link) => [["broadcast", transfer_s(facts.full_bytes, link)]];

  // Machine-seconds of waiting per sync: through the bucket, and by broadcast.
  function stopped_s(facts, link, replicas) {
    const whole = transfer_s(facts.full_bytes, link);
    return [facts.diff_s + replicas * facts.pause_s, (1 + replicas) * whole];
  }

  // Bytes over all links per sync: one upload and a download each, and a broadcast to each.
  const moved_bytes = (facts, replicas) => [(1 + replicas) * facts.delta_bytes, replicas * facts.full_bytes];

  // The link speed from which a broadcast serves new weights sooner than the bucket does.
  function break_even_link(facts) {
    const fixed = facts.diff_s + facts.encode_s + facts.poll_s / 2 + facts.stage_s + facts.pause_s;
    return (facts.full_bytes - 2 * facts.delta_bytes) / fixed;
  }

  // The events in the bucket and at two replicas, in order: event, version, replica ("" for the bucket), bytes.
  // Replica A follows from the start. B joins when `joins_at` is published: it fetches the newest anchor, then
  // the deltas after it.
  function landings(facts, versions, anchor_every, joins_at) {
    const { full_bytes, delta_bytes } = facts;
    const story = [["anchor", 0, "", full_bytes], ["take-anchor", 0, "A", full_bytes]];
    for (let version = 1; version <= versions; version++) {
      story.push(["delta", version, "", delta_bytes]);
      if (version % anchor_every === 0) story.push(["anchor", version, "", full_bytes]);
      story.push(["take-delta", version, "A", delta_bytes]);
      if (version === joins_at) {
        const anchor = version - version % anchor_every;
        story.push(["join", version, "B", 0], ["take-anchor", anchor, "B", full_bytes]);
        for (let v = anchor + 1; v <= version; v++) story.push(["take-delta", v, "B", delta_bytes]);
      } else if (version > joins_at) story.push(["take-delta", version, "B", delta_bytes]);
    }
    return story;
  }

  // The bytes that a replica fetches to join at `version`.
  const bytes_to_join = (facts, anchor_every, version) =>
    facts.full_bytes + (version % anchor_every) * facts.delta_bytes;

  window.dws.formulas = {
    transfer_s, ulp, bf16, bits, flip_chance, flip_share, rate_for_share, broadcast_spans, delta_spans,
    idle_share, steps_done, bucket_sync, broadcast_sync, stopped_s, moved_bytes, break_even_link, landings, bytes_to_join,
  };
})();
