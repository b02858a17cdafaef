"""The page that ``ckptd report`` writes: charts as SVG, tables, one HTML file that needs no network."""
