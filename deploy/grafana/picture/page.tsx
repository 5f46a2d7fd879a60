// A dashboard as Grafana shows it, from window.PAGE, which picture.mjs writes.
import { createTheme, dateTime, FieldColorModeId, FieldType, fieldMatchers, FieldMatcherID, getDisplayProcessor, getMinMaxAndDelta, ThemeContext } from "@grafana/data";
import type { DataFrame, FieldConfig } from "@grafana/data";
import { BigValue, BigValueColorMode, BigValueGraphMode, GlobalStyles, PanelChrome, TimeSeries } from "@grafana/ui";
import { interpolateViridis } from "d3-scale-chromatic";
import { createRoot } from "react-dom/client";

type Series = { name: string; points: [number, number][] };
type Panel = {
  title: string;
  type: string;
  gridPos: { x: number; y: number; w: number; h: number };
  defaults: FieldConfig;
  options: any;
  series: Series[];
};
type Page = { title: string; width: number; from: number; to: number; panels: Panel[] };

const PAGE = (window as any).PAGE as Page;
const theme = createTheme({ colors: { mode: "dark" } });
const RANGE = { from: dateTime(PAGE.from), to: dateTime(PAGE.to), raw: { from: dateTime(PAGE.from), to: dateTime(PAGE.to) } };
const CELL = 38, GAP = 8, TOP = 52;

/** One frame per series, as from a query of Prometheus. */
function frames({ defaults, options, series, type }: Panel): DataFrame[] {
  return series.map(({ name, points }, index) => {
    const x = type === "trend" ? { name: options.xField, type: FieldType.number } : { name: "Time", type: FieldType.time };
    const color = defaults.color ?? { mode: type === "stat" ? FieldColorModeId.Thresholds : FieldColorModeId.PaletteClassic };
    const fields: any[] = [
      { ...x, values: points.map(([at]) => at), config: {} },
      { name: "Value", type: FieldType.number, values: points.map(([, value]) => value), config: { ...defaults, color, displayName: name } },
    ];
    for (const field of fields) {
      field.state = { displayName: field.config.displayName ?? field.name, seriesIndex: index };
      field.display = getDisplayProcessor({ field, theme, timeZone: "utc" });
      if (field.type === FieldType.number) field.state.range = getMinMaxAndDelta(field);
    }
    return { name, refId: String(index), length: points.length, fields };
  });
}

function Figure({ panel, width, height }: Sized) {
  const [x, y] = frames(panel)[0].fields;
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

function Lines({ panel, width, height }: Sized) {
  const x = panel.type === "trend" ? { id: FieldMatcherID.byName, options: panel.options.xField } : { id: FieldMatcherID.firstTimeField, options: {} };
  return (
    <TimeSeries
      frames={frames(panel)}
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
  const rows = [...panel.series].sort((a, b) => (a.name < b.name ? -1 : 1));
  const values = rows.flatMap(({ points }) => points.map(([, value]) => value));
  const low = Math.min(...values), high = Math.max(...values);
  const shade = (value: number) => interpolateViridis(high > low ? (value - low) / (high - low) : 0.5);
  const show = getDisplayProcessor({ field: { type: FieldType.number, config: { ...panel.defaults, decimals: 2 } }, theme });
  const text = (value: number) => { const shown = show(value); return `${shown.text}${shown.suffix ?? ""}`; };
  const left = 42, bottom = 46, wide = width - left - 8, tall = height - bottom - 6;
  const at = (time: number) => left + (wide * (time - PAGE.from)) / (PAGE.to - PAGE.from);
  const steps = rows.flatMap(({ points }) => points.slice(1).map(([time], index) => time - points[index][0]));
  const cell = (wide * Math.min(...steps)) / (PAGE.to - PAGE.from);
  const line = tall / rows.length, every = Math.ceil(rows.length / 12);
  const style = { fill: theme.colors.text.secondary, fontSize: 11, fontFamily: theme.typography.fontFamily };
  const ticks = [0.1, 0.3, 0.5, 0.7, 0.9].map((share) => PAGE.from + share * (PAGE.to - PAGE.from));
  return (
    <svg width={width} height={height} shapeRendering="crispEdges">
      {rows.map(({ name, points }, row) => (
        <g key={name}>
          {points.map(([time, value]) => (
            <rect key={time} x={at(time) - cell} y={6 + tall - line * (row + 1)} width={cell + 0.5} height={line + 0.5} fill={shade(value)} />
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

type Sized = { panel: Panel; width: number; height: number };
const BODIES: Record<string, (props: Sized) => JSX.Element> = { stat: Figure, timeseries: Lines, trend: Lines, heatmap: HeatMap };

function Placed({ panel }: { panel: Panel }) {
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
          panel.series.length > 0 ? <Body panel={panel} width={width} height={height} /> : <div style={{ color: theme.colors.text.secondary, textAlign: "center" }}>No data</div>
        }
      </PanelChrome>
    </div>
  );
}

createRoot(document.getElementById("root")!).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    <div style={{ ...theme.typography.h3, position: "absolute", left: 2 * GAP, top: 12, color: theme.colors.text.primary }}>{PAGE.title}</div>
    {PAGE.panels.map((panel, index) => <Placed key={index} panel={panel} />)}
  </ThemeContext.Provider>,
);
