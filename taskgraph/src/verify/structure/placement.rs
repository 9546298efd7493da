//! Each task has exactly one place: in one worker's list, or with the one event that launches it.

use super::RankCheck;
use crate::ids::TaskId;
use crate::task_graph::EventType;

impl RankCheck<'_> {
    pub(super) fn static_placement(&mut self) {
        let graphs = self.graphs;
        let graph = &graphs[self.rank];
        if graph.worker_lists.len() != graph.workers as usize {
            return self.say(format!(
                "{} worker lists for {} workers",
                graph.worker_lists.len(),
                graph.workers
            ));
        }
        let mut placed = vec![false; graph.tasks.len()];
        for (worker, list) in graph.worker_lists.iter().enumerate() {
            for &index in list {
                match placed.get_mut(index as usize) {
                    None => self
                        .say(format!("worker {worker}'s list contains task {index}, which does not exist")),
                    Some(true) => self.say_task(index, "is in more than one place of the workers' lists"),
                    Some(place) => {
                        *place = true;
                        if index <= TaskId::BEGIN {
                            self.say_task(index, "is in a worker's list, but belongs to the batch step");
                        } else if graph.tasks[index as usize].worker != Some(worker as u32) {
                            self.say_task(
                                index,
                                &format!("is in worker {worker}'s list, but names another worker"),
                            );
                        }
                    }
                }
                if self.full() {
                    return;
                }
            }
        }
        for (index, placed) in placed.into_iter().enumerate().skip(2) {
            if !placed && !self.full() {
                self.say_task(index as u32, "is in no worker's list");
            }
        }
    }

    pub(super) fn dynamic_placement(&mut self) {
        let graphs = self.graphs;
        let graph = &graphs[self.rank];
        if !graph.worker_lists.iter().all(Vec::is_empty) {
            return self.say("dynamic placement has no worker lists".into());
        }
        let mut launched = vec![u32::MAX; graph.tasks.len()];
        for (e, event) in graph.events.iter().enumerate() {
            let launches = matches!(
                event.event_type,
                EventType::LaunchTasks | EventType::LaunchMassiveTasks | EventType::LaunchDependentTasks
            );
            if !launches || event.first_task >= event.last_task || self.full() {
                continue;
            }
            if event.last_task as usize > graph.tasks.len() || event.first_task <= TaskId::BEGIN {
                self.say(format!(
                    "event {e} launches tasks {}..{}, outside 2..{}",
                    event.first_task,
                    event.last_task,
                    graph.tasks.len()
                ));
                continue;
            }
            for index in event.first_task..event.last_task {
                let by = &mut launched[index as usize];
                if *by != u32::MAX && !self.full() {
                    let message = format!("is launched twice, by events {by} and {e}");
                    self.say_task(index, &message);
                }
                launched[index as usize] = e as u32;
            }
        }
        for (index, task) in graph.tasks.iter().enumerate().skip(2) {
            if self.full() {
                return;
            }
            if launched[index] == u32::MAX {
                self.say_task(index as u32, "is launched by no event");
            } else if task.dependencies.as_slice() != [launched[index]] {
                let message = format!(
                    "is launched by event {}, but depends on events {:?}: under dynamic placement it must depend on exactly that one",
                    launched[index],
                    task.dependencies.as_slice()
                );
                self.say_task(index as u32, &message);
            } else if task.worker.is_some() {
                self.say_task(index as u32, "names a worker under dynamic placement");
            }
        }
    }
}
