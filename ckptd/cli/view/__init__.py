"""Tables, bars, the screen and Prometheus text: how the commands present a status."""
