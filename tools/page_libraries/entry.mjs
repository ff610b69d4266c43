// What the page takes from each library; esbuild leaves out the rest.
export { graphlib, layout } from "@dagrejs/dagre";
export { select } from "d3-selection";
export { zoom, zoomIdentity } from "d3-zoom";
