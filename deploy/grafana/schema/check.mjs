// Writes every dashboard as a typed constant and lets the TypeScript compiler judge: node check.mjs, after npm ci.
// One constant is wrong on purpose: if the compiler took it, the check would see nothing.
import { spawnSync } from "node:child_process";
import { mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const dashboards = join(here, "..", "dashboards");
const names = readdirSync(dashboards).filter((name) => name.endsWith(".json")).sort();
if (names.length === 0) {
  console.error(`${dashboards} holds no dashboard; run make dashboards.`);
  process.exit(1);
}

const lines = ['import type { Dashboard } from "@grafana/schema";', 'import type { Json } from "../json";', ""];
names.forEach((name, at) => {
  const text = readFileSync(join(dashboards, name), "utf-8").trim();
  lines.push(`// ${name}`, `export const dashboard${at}: Json<Dashboard> = ${text};`, "");
});
lines.push("// @ts-expect-error graphTooltip is 0, 1 or 2, and a panel has a type");
lines.push('export const wrong: Json<Dashboard> = { schemaVersion: 1, graphTooltip: "shared", panels: [{ title: "x" }] };');
mkdirSync(join(here, "build"), { recursive: true });
writeFileSync(join(here, "build", "dashboards.ts"), lines.join("\n") + "\n");

const compiler = join(here, "node_modules", "typescript", "bin", "tsc");
const done = spawnSync(process.execPath, [compiler, "-p", here], { stdio: "inherit" });
if (done.status === 0) console.log(`${names.length} dashboards fit Grafana's types.`);
process.exit(done.status ?? 1);
