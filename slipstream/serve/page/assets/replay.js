// Plays recordings again, all on one clock that starts at each one's first token.

/**
 * @param parts [{recording, push}] `push` gets the tokens whose time has come.
 * @param pace 1 is real time, 0.1 ten times slower.
 * @param signal ends it; the tokens that are left come at once.
 */
export function replay(parts, pace, signal) {
  const begin = performance.now();
  const places = parts.map(() => 0);
  return new Promise((resolve) => {
    const turn = () => {
      const elapsed = signal.aborted ? Infinity : ((performance.now() - begin) / 1000) * pace;
      parts.forEach(({ recording, push }, index) => {
        const { tokens } = recording;
        const from = places[index];
        let to = from;
        while (to < tokens.length && tokens[to].time - tokens[0].time <= elapsed) to += 1;
        places[index] = to;
        if (to > from) push(tokens.slice(from, to));
      });
      if (places.every((place, index) => place >= parts[index].recording.tokens.length)) resolve();
      else requestAnimationFrame(turn);
    };
    signal.addEventListener("abort", turn, { once: true });
    turn();
  });
}

/** A pace at which a person can follow: about five passes of the target a second, never faster than real. */
export function slowPace(recordings) {
  const gaps = recordings
    .filter(({ tokens }) => tokens.length > 1)
    .map(({ tokens }) => (tokens.at(-1).time - tokens[0].time) / (tokens.at(-1).step - tokens[0].step || 1));
  return gaps.length ? Math.min(1, Math.min(...gaps) * 5) : 1;
}
