"""Pages of figures: charts as SVG, sections as one HTML file. Knows nothing of jobs or engines."""
