// Pictures of the dashboards with the data of the last minutes, drawn by Grafana's own components (@grafana/ui) in a headless Chromium:
//
//   npm ci && node picture.mjs http://127.0.0.1:9090 10 ../../../docs/images [footprint traffic ...]
//
// Grafana's server is not needed. Its heat map is no part of @grafana/ui, so page.tsx draws that one itself.
import { spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import UPNG from "upng-js";

const here = dirname(fileURLToPath(import.meta.url));
const dashboards = join(here, "..", "dashboards");
const SCRAPE_SECONDS = 5; // as in deploy/prometheus/prometheus.yml
const POINTS = 240; // of a line
const WIDTH = 1680; // pixels; a row of a dashboard's grid has 38, eight of which are a gap
const [prometheus, minutes, out, ...wanted] = process.argv.slice(2);
const seconds = Math.round(60 * Number(minutes));

if (!prometheus || !(seconds > 0) || !out) {
  console.error("Usage: node picture.mjs PROMETHEUS_URL MINUTES DIRECTORY [DASHBOARD ...]");
  process.exit(2);
}

const end = Date.now() / 1000;
const step = Math.max(SCRAPE_SECONDS, Math.ceil(seconds / POINTS));

async function ask(path, parameters) {
  const answer = await fetch(`${prometheus}/api/v1/${path}`, { method: "POST", body: new URLSearchParams(parameters) });
  const body = await answer.json();
  if (body.status !== "success") throw new Error(`Prometheus refuses ${parameters.query}: ${body.error}`);
  return body.data.result;
}

/** What Grafana puts in the place of its variables when a dashboard shows everything. */
function filled(expr) {
  return expr
    .replaceAll("$__rate_interval", `${Math.max(step + SCRAPE_SECONDS, 4 * SCRAPE_SECONDS)}s`)
    .replaceAll("$__range", `${seconds}s`)
    .replace(/\$(instance|predictor|model)\b/g, ".*");
}

function named(format, labels) {
  return (format ?? "").replace(/{{(\w+)}}/g, (_, label) => labels[label] ?? "");
}

/** What a query brings: series of [ms, value], or a table of labels and values as they are at the end. */
async function answerOf(panel, { expr, refId, legendFormat }) {
  const query = filled(expr);
  if (panel.type === "trend") {
    const found = await ask("query", { query, time: end });
    return found.length > 0 ? [{ refId, rows: found.map(({ metric, value }) => ({ labels: metric, value: Number(value[1]) })) }] : [];
  }
  const found = await ask("query_range", { query, start: end - seconds, end, step });
  const series = found.map(({ metric, values }) => ({
    name: named(legendFormat, metric),
    points: values.map(([at, value]) => [1000 * at, Number(value)]).filter(([, value]) => Number.isFinite(value)),
  }));
  return series.filter(({ points }) => points.length > 0);
}

async function page(dashboard) {
  const panels = [];
  for (const panel of dashboard.panels) {
    const answers = await Promise.all((panel.targets ?? []).map((target) => answerOf(panel, target)));
    panels.push({
      title: panel.title,
      type: panel.type,
      gridPos: panel.gridPos,
      defaults: panel.fieldConfig?.defaults ?? {},
      options: panel.options ?? {},
      transformations: panel.transformations ?? [],
      answers: answers.flat(),
    });
  }
  return { title: dashboard.title, width: WIDTH, from: 1000 * (end - seconds), to: 1000 * end, step: 1000 * step, panels };
}

const bundle = await build({
  entryPoints: [join(here, "page.tsx")],
  bundle: true,
  write: false,
  outdir: here, // nothing is written there: so scripts and styles come apart
  minify: true,
  format: "iife",
  jsx: "automatic",
  logLevel: "error",
  define: { "process.env.NODE_ENV": '"production"', global: "window" },
  loader: { ".svg": "dataurl", ".woff": "dataurl", ".woff2": "dataurl", ".ttf": "dataurl", ".png": "dataurl" },
});
const [script, style] = [".js", ".css"].map((kind) => bundle.outputFiles.find(({ path }) => path.endsWith(kind)).text.replaceAll("</", "<\\/"));
const scratch = mkdtempSync(join(tmpdir(), "ecospec-picture-"));
mkdirSync(out, { recursive: true });
try {
  for (const file of readdirSync(dashboards).filter((name) => name.endsWith(".json")).sort()) {
    const name = file.replace(/^ecospec-(.*)\.json$/, "$1");
    if (wanted.length > 0 && !wanted.includes(name)) continue;
    const data = await page(JSON.parse(readFileSync(join(dashboards, file), "utf-8")));
    const rows = Math.max(...data.panels.map(({ gridPos }) => gridPos.y + gridPos.h));
    const html = join(scratch, `${name}.html`);
    const picture = resolve(out, `dashboard-${name}.png`);
    const json = JSON.stringify(data).replaceAll("<", "\\u003c");
    writeFileSync(html, `<!doctype html><meta charset="utf-8"><style>${style}</style><div id="root"></div><script>window.PAGE=${json}</script><script>${script}</script>`);
    const taken = spawnSync(
      "chromium",
      [
        "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=10000",
        `--user-data-dir=${join(scratch, "profile")}`, `--window-size=${WIDTH},${38 * rows + 70}`, `--screenshot=${picture}`,
        `file://${html}`,
      ],
      { encoding: "utf-8", timeout: 120_000 },
    );
    const problem = taken.status === 0 ? taken.stderr.split("\n").find((line) => line.includes("Uncaught")) : `${taken.error ?? taken.stderr}`;
    if (problem !== undefined) throw new Error(`chromium took no picture of ${name}: ${problem}`);
    const full = UPNG.decode(readFileSync(picture)); // with 256 colours it is a third as large
    writeFileSync(picture, Buffer.from(UPNG.encode([UPNG.toRGBA8(full)[0]], full.width, full.height, 256)));
    const empty = data.panels.filter(({ type, answers }) => type !== "row" && answers.length === 0);
    console.log(`${picture}${empty.length > 0 ? `; without data: ${empty.map(({ title }) => title).join(", ")}` : ""}`);
  }
} finally {
  rmSync(scratch, { recursive: true });
}
