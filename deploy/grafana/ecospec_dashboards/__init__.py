"""EcoSpec's Grafana dashboards as code; generate.py writes them as JSON."""

from .footprint import footprint
from .predictor import predictor
from .serving import serving
from .speculation import speculation
from .traffic import traffic

DASHBOARDS = (footprint, traffic, speculation, serving, predictor)
