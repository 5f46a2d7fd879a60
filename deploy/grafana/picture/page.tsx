// A dashboard as Grafana shows it, from window.PAGE, which picture.mjs writes.
import { createTheme, dateTime, FieldColorModeId, FieldType, fieldMatchers, FieldMatcherID, getDisplayProcessor, getMinMaxAndDelta, standardTransformers, standardTransformersRegistry, ThemeContext, transformDataFrame } from "@grafana/data";
import type { DataFrame, DataTransformerConfig, Field, FieldConfig } from "@grafana/data";
import { BigValue, BigValueColorMode, BigValueGraphMode, GlobalStyles, PanelChrome, TimeSeries } from "@grafana/ui";
import { interpolateViridis } from "d3-scale-chromatic";
import { createRoot } from "react-dom/client";
import { lastValueFrom } from "rxjs";

type Series = { name: string; points: [number, number][] };
type Table = { refId: string; rows: { labels: Record<string, string>; value: number }[] };
type Panel = {
  title: string;
  type: string;
  gridPos: { x: number; y: number; w: number; h: number };
  defaults: FieldConfig;
  options: any;
  transformations: DataTransformerConfig[];
  answers: any[]; // Table of a trend, else Series
};
type Page = { title: string; width: number; from: number; to: number; step: number; panels: Panel[] };
type Sized = { panel: Panel; frames: DataFrame[]; width: number; height: number };

const PAGE = (window as any).PAGE as Page;
const theme = createTheme({ colors: { mode: "dark" } });
const RANGE = { from: dateTime(PAGE.from), to: dateTime(PAGE.to), raw: { from: dateTime(PAGE.from), to: dateTime(PAGE.to) } };
const CELL = 38, GAP = 8, TOP = 52;

standardTransformersRegistry.setInit(() =>
  [...new Map(Object.values(standardTransformers).map((transformation: any) => [transformation.id, { id: transformation.id, transformation }])).values()] as any, // some have two names
);

function field(name: string, type: FieldType, values: any[], config: FieldConfig = {}): Field {
  return { name, type, values, config };
}

function ofSeries({ name, points }: Series): DataFrame {
  const times = field("Time", FieldType.time, points.map(([at]) => at));
  return { name, length: points.length, fields: [times, field("Value", FieldType.number, points.map(([, value]) => value), { displayName: name })] };
}

function ofTable({ refId, rows }: Table, _: number, all: Table[]): DataFrame {
  const labels = Object.keys(rows[0].labels).map((label) => field(label, FieldType.string, rows.map((row) => row.labels[label])));
  const times = field("Time", FieldType.time, rows.map(() => PAGE.to));
  const values = field(all.length > 1 ? `Value #${refId}` : "Value", FieldType.number, rows.map(({ value }) => value));
  return { refId, length: rows.length, fields: [times, ...labels, values] };
}

/** What a panel's queries answered, after its transformations, ready to be drawn. */
async function framesOf({ answers, defaults, options, transformations, type }: Panel): Promise<DataFrame[]> {
  const asked = type === "trend" ? answers.map(ofTable) : answers.map(ofSeries);
  const frames = await lastValueFrom(transformDataFrame(transformations, asked));
  const color = defaults.color ?? { mode: type === "stat" ? FieldColorModeId.Thresholds : FieldColorModeId.PaletteClassic };
  let index = 0;
  for (const frame of frames) {
    frame.fields = frame.fields.map((plain) => {
      if (plain.type !== FieldType.number || plain.name === options.xField) return plain;
      const custom = { pointSize: 5, ...defaults.custom }; // as Grafana, where a panel does not say
      const made: Field = { ...plain, config: { ...defaults, color, custom, ...plain.config } };
      made.state = { ...plain.state, displayName: made.config.displayName ?? plain.name, seriesIndex: index++, range: getMinMaxAndDelta(made) };
      return made;
    });
    for (const made of frame.fields) made.display = getDisplayProcessor({ field: made, theme, timeZone: "utc" });
  }
  return frames;
}

function Figure({ panel, frames, width, height }: Sized) {
  const [x, y] = frames[0].fields;
  return (
    <BigValue
      theme={theme}
      width={width}
      height={height}
      value={y.display!(y.values[y.values.length - 1])}
      sparkline={{ x, y, timeRange: RANGE }}
      colorMode={panel.options.colorMode ?? BigValueColorMode.Value}
      graphMode={panel.options.graphMode ?? BigValueGraphMode.Area}
    />
  );
}

function Lines({ panel, frames, width, height }: Sized) {
  const x = panel.type === "trend" ? { id: FieldMatcherID.byName, options: panel.options.xField } : { id: FieldMatcherID.firstTimeField, options: {} };
  return (
    <TimeSeries
      frames={frames}
      structureRev={1}
      timeRange={RANGE}
      timeZone="utc"
      width={width}
      height={height}
      legend={panel.options.legend ?? { showLegend: true, displayMode: "list", placement: "bottom", calcs: [] }}
      fields={{ x: fieldMatchers.get(x.id).get(x.options), y: fieldMatchers.get(FieldMatcherID.byType).get(FieldType.number) }}
    />
  );
}

/** Not Grafana's, which is no part of its library: a row of cells for each series, the scale below. */
function HeatMap({ panel, width, height }: Sized) {
  const rows = [...(panel.answers as Series[])].sort((a, b) => (a.name < b.name ? -1 : 1));
  const values = rows.flatMap(({ points }) => points.map(([, value]) => value));
  const low = Math.min(...values), high = Math.max(...values);
  const shade = (value: number) => interpolateViridis(high > low ? (value - low) / (high - low) : 0.5);
  const show = getDisplayProcessor({ field: { type: FieldType.number, config: { ...panel.defaults, decimals: 2 } }, theme });
  const text = (value: number) => { const shown = show(value); return `${shown.text}${shown.suffix ?? ""}`; };
  const left = 42, bottom = 46, wide = width - left - 8, tall = height - bottom - 6;
  const at = (time: number) => left + (wide * (time - PAGE.from)) / (PAGE.to - PAGE.from);
  const cell = (wide * PAGE.step) / (PAGE.to - PAGE.from);
  const line = tall / rows.length, every = Math.ceil(rows.length / 12);
  const style = { fill: theme.colors.text.secondary, fontSize: 11, fontFamily: theme.typography.fontFamily };
  const ticks = [0.1, 0.3, 0.5, 0.7, 0.9].map((share) => PAGE.from + share * (PAGE.to - PAGE.from));
  return (
    <svg width={width} height={height} shapeRendering="crispEdges">
      {rows.map(({ name, points }, row) => (
        <g key={name}>
          {points.map(([time, value]) => (
            <rect key={time} x={Math.max(left, at(time) - cell)} y={6 + tall - line * (row + 1)} width={cell + 0.5} height={line + 0.5} fill={shade(value)} />
          ))}
          {row % every === 0 && <text x={left - 6} y={6 + tall - line * (row + 0.5) + 4} textAnchor="end" style={style}>{name}</text>}
        </g>
      ))}
      {ticks.map((time) => <text key={time} x={at(time)} y={tall + 22} textAnchor="middle" style={style}>{dateTime(time).utc().format("HH:mm:ss")}</text>)}
      {Array.from({ length: 64 }, (_, i) => <rect key={i} x={left + 3 * i} y={height - 16} width={3} height={10} fill={interpolateViridis(i / 63)} />)}
      <text x={left - 6} y={height - 7} textAnchor="end" style={style}>{text(low)}</text>
      <text x={left + 198} y={height - 7} style={style}>{text(high)}</text>
    </svg>
  );
}

const BODIES: Record<string, (props: Sized) => JSX.Element> = { stat: Figure, timeseries: Lines, trend: Lines, heatmap: HeatMap };

function Placed({ panel, frames }: { panel: Panel; frames: DataFrame[] }) {
  const { x, y, w, h } = panel.gridPos;
  const column = (PAGE.width - GAP) / 24;
  const place = { position: "absolute" as const, left: GAP + x * column, top: TOP + y * CELL, width: w * column - GAP, height: h * CELL - GAP };
  if (panel.type === "row") {
    return <div style={{ ...place, ...theme.typography.h5, lineHeight: `${CELL - GAP}px`, color: theme.colors.text.primary }}>{panel.title}</div>;
  }
  const Body = BODIES[panel.type];
  return (
    <div style={place}>
      <PanelChrome title={panel.title} width={place.width} height={place.height}>
        {(width, height) =>
          frames.length > 0 ? <Body panel={panel} frames={frames} width={width} height={height} /> : <div style={{ color: theme.colors.text.secondary, textAlign: "center" }}>No data</div>
        }
      </PanelChrome>
    </div>
  );
}

Promise.all(PAGE.panels.map(framesOf)).then((frames) =>
  createRoot(document.getElementById("root")!).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={{ ...theme.typography.h3, position: "absolute", left: 2 * GAP, top: 12, color: theme.colors.text.primary }}>{PAGE.title}</div>
      {PAGE.panels.map((panel, index) => <Placed key={index} panel={panel} frames={frames[index]} />)}
    </ThemeContext.Provider>,
  ),
);
