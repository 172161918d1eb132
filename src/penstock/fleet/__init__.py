"""Many jobs on unequal machines: the policies of Gavel on the plans of Penstock, and what a run costs.

A policy divides the time of all devices among jobs, by how fast each job runs on each kind of device. Source:
[Narayanan 2021, chapters 5 and 6]. scipy solves the linear programs: `pip install 'penstock[fleet]'`.

May import the planner and what it plans with; only ``commands`` imports this room. Start reading in ``problems.py``.
"""

from penstock.fleet.allocations import Allocation
from penstock.fleet.cluster_jobs import ClusterJob
from penstock.fleet.executor import FleetExecutor
from penstock.fleet.fleet_files import FleetFile, TrainingCommand
from penstock.fleet.histories import CompletedJob, FleetRun, Held
from penstock.fleet.jobs import Arrival, Entity, Job, Kind
from penstock.fleet.policies import POLICIES, Policy
from penstock.fleet.policies.completion_times import finish_time_fairness, min_makespan, min_makespan_within_budget
from penstock.fleet.policies.costs import max_throughput, min_cost, min_cost_near_deadlines, min_cost_with_deadlines
from penstock.fleet.policies.fairness import hierarchical, max_min_fairness, water_filling
from penstock.fleet.policies.queues import allox, fifo, shortest_job_first, strict_fifo
from penstock.fleet.problems import Pair, Problem
from penstock.fleet.ray_nodes import RayNodes
from penstock.fleet.round_scheduler import Lease, RoundScheduler
from penstock.fleet.run_pictures import completion_svg, devices_svg, run_page
from penstock.fleet.simulations import PriceHistory, simulate_fleet
from penstock.fleet.throughputs import Machines, ModelJob, PlannedSpeed, ThroughputTable, throughput_table

__all__ = [
    "POLICIES",
    "Allocation",
    "Arrival",
    "ClusterJob",
    "CompletedJob",
    "Entity",
    "FleetExecutor",
    "FleetFile",
    "FleetRun",
    "Held",
    "Job",
    "Kind",
    "Lease",
    "Machines",
    "ModelJob",
    "Pair",
    "PlannedSpeed",
    "Policy",
    "PriceHistory",
    "Problem",
    "RayNodes",
    "RoundScheduler",
    "ThroughputTable",
    "TrainingCommand",
    "allox",
    "completion_svg",
    "devices_svg",
    "fifo",
    "finish_time_fairness",
    "hierarchical",
    "max_min_fairness",
    "max_throughput",
    "min_cost",
    "min_cost_near_deadlines",
    "min_cost_with_deadlines",
    "min_makespan",
    "min_makespan_within_budget",
    "run_page",
    "shortest_job_first",
    "simulate_fleet",
    "strict_fifo",
    "throughput_table",
    "water_filling",
]
