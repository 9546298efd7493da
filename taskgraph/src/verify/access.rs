//! Accesses to the bytes of a rank's memory: by the rank's own tasks, and by tasks of other ranks that write there.

use super::boxes::{Scattered, boxes, hole, one_region, without};
use super::ranks::Ranks;
use super::structure::is_put;
use crate::region::Region;
use crate::task_graph::{Operand, Place, Space, core_types};
use crate::trust::RowShares;

/// The symmetric tensors of each rank, in the order of the heap.
pub(super) struct Symmetric {
    /// Indices of the symmetric tensors of each held rank.
    list: Vec<Vec<u32>>,
    /// For each held rank and tensor, its index in that list.
    ordinal: Vec<Vec<u32>>,
    /// For each held rank, the operands of other ranks in its memory.
    remote: Vec<Vec<RemoteOperand>>,
    world: usize,
}

/// An operand of a task of `rank` in another rank's memory.
#[derive(Clone, Copy)]
struct RemoteOperand {
    rank: u16,
    task: u32,
    operand: u32,
}

impl Symmetric {
    /// The peers must exist, and the remote operands must be symmetric.
    pub(super) fn new(graphs: Ranks<'_>) -> Self {
        let world = graphs.len();
        let alike = graphs.symmetry().is_some();
        // If ranks are alike: the operands of rank 0, by the rank whose memory they are in.
        let mut remote: Vec<Vec<RemoteOperand>> = vec![Vec::new(); world];
        let mut found = Symmetric { list: Vec::new(), ordinal: Vec::new(), remote: Vec::new(), world };
        for (rank, graph) in graphs.held().iter().enumerate() {
            let mut list = Vec::new();
            let mut ordinal = vec![u32::MAX; graph.tensors.len()];
            for (index, tensor) in graph.tensors.iter().enumerate() {
                if tensor.space == Space::Symmetric {
                    ordinal[index] = list.len() as u32;
                    list.push(index as u32);
                }
            }
            found.list.push(list);
            found.ordinal.push(ordinal);
            for (index, task) in graph.tasks.iter().enumerate() {
                let first = task.first_operand + u32::from(task.num_inputs);
                for (i, operand) in graph.outputs(task).iter().enumerate() {
                    let entry =
                        RemoteOperand { rank: rank as u16, task: index as u32, operand: first + i as u32 };
                    match operand.place {
                        Place::Own => {}
                        Place::Peer(peer) if usize::from(peer) != rank => {
                            remote[usize::from(peer)].push(entry);
                        }
                        Place::Peer(_) => {}
                        Place::All => {
                            for (owner, list) in remote.iter_mut().enumerate() {
                                if owner != rank {
                                    list.push(entry);
                                }
                            }
                        }
                    }
                }
            }
        }
        found.remote = if alike {
            // Rank r is to rank 0 what rank 0 is to rank -r.
            let of_rank = |rank: usize| {
                let list = &remote[(world - rank) % world];
                list.iter().map(move |entry| RemoteOperand { rank: rank as u16, ..*entry })
            };
            vec![(0..world).flat_map(of_rank).collect()]
        } else {
            remote
        };
        found
    }

    fn held(&self, rank: usize) -> usize {
        if self.list.len() < self.world { 0 } else { rank }
    }

    fn tensor_at(&self, owner: usize, rank: usize, tensor: u32) -> usize {
        let (owner, rank) = (self.held(owner), self.held(rank));
        self.list[owner][self.ordinal[rank][tensor as usize] as usize] as usize
    }

    /// The operands of other ranks in the memory of `owner`.
    fn remote(&self, owner: usize) -> impl Iterator<Item = RemoteOperand> + '_ {
        let held = self.held(owner);
        let (by, world) = (owner - held, self.world);
        self.remote[held].iter().map(move |entry| RemoteOperand {
            rank: ((usize::from(entry.rank) + by) % world) as u16,
            ..*entry
        })
    }
}

/// One access to a tensor.
#[derive(Clone, Copy)]
pub(super) struct Access {
    /// The accessed region.
    pub(super) region: Region,
    /// Rank of the task.
    pub(super) rank: u16,
    /// True if it writes.
    pub(super) write: bool,
    /// Index of the task on its rank.
    pub(super) task: u32,
}

impl Access {
    /// The task, for messages.
    pub(super) fn place(&self) -> (u16, u32) {
        (self.rank, self.task)
    }
}

/// All accesses to the tensors in one rank's memory.
pub(super) struct Memory<'g> {
    pub(super) owner: usize,
    graphs: Ranks<'g>,
    offsets: Vec<u32>,
    accesses: Vec<Access>,
    /// For each tensor, true if it has an access that this rank's barrier does not bound.
    remote: Vec<bool>,
    /// For each tensor, how tasks share its rows.
    shares: Vec<RowShares>,
    wanted: Vec<bool>,
    found: Vec<(u32, Access)>,
}

impl<'g> Memory<'g> {
    /// The accesses to the selected tensors of `owner`: first those of its own tasks in the given order, then those of other
    /// ranks.
    pub(super) fn new(
        graphs: Ranks<'g>,
        symmetric: &Symmetric,
        owner: usize,
        own_order: &[u32],
        wanted: impl Fn(usize) -> bool,
    ) -> Self {
        let own = &graphs[owner];
        let tensors = own.tensors.len();
        let mut memory = Memory {
            owner,
            graphs,
            offsets: vec![0; tensors + 1],
            accesses: Vec::new(),
            remote: vec![false; tensors],
            shares: vec![RowShares::default(); tensors],
            wanted: (0..tensors).map(wanted).collect(),
            found: Vec::with_capacity(own.operands.len()),
        };
        let mut add_rows = |tensor: usize, operand: &Operand| {
            if let Some(trust) = operand.trust {
                memory.shares[tensor].add(trust);
            }
        };
        own.operands.iter().for_each(|operand| add_rows(operand.tensor as usize, operand));
        for entry in symmetric.remote(owner) {
            let operand = &graphs[entry.rank as usize].operands[entry.operand as usize];
            if operand.trust.is_some() {
                add_rows(symmetric.tensor_at(owner, entry.rank as usize, operand.tensor), operand);
            }
        }
        // If rank 0's graph stands for a rank, it names the peers as rank 0 does.
        let self_rank = own.rank as usize;
        let sum = own.type_names.iter().position(|name| name == core_types::REDUCE);
        for &index in own_order {
            let task = &own.tasks[index as usize];
            let inputs = usize::from(task.num_inputs);
            let first = task.first_operand as usize;
            let put = is_put(task);
            let sums = Some(usize::from(task.task_type)) == sum;
            let operands = &own.operands[first..first + inputs + usize::from(task.num_outputs)];
            for (i, operand) in operands.iter().enumerate() {
                let tensor = operand.tensor as usize;
                let elsewhere = matches!(operand.place, Place::Peer(peer) if usize::from(peer) != self_rank);
                if !memory.wanted[tensor] || elsewhere {
                    continue;
                }
                let hole = (sums && i < inputs).then(|| hole(own, task, i)).flatten();
                // A sum leaves out the slot of its own rank.
                let turn = |slot: u32| ((slot as usize + owner - self_rank) % graphs.len()) as u32;
                let hole = hole.map(turn);
                memory.add(tensor, operand, hole, (owner as u16, index, i >= inputs));
                memory.remote[tensor] |= put;
            }
        }
        for entry in symmetric.remote(owner) {
            let operand = &graphs[entry.rank as usize].operands[entry.operand as usize];
            let tensor = symmetric.tensor_at(owner, entry.rank as usize, operand.tensor);
            if memory.wanted[tensor] {
                memory.add(tensor, operand, None, (entry.rank, entry.task, true));
                memory.remote[tensor] = true;
            }
        }
        memory.sort(tensors);
        memory
    }

    fn add(
        &mut self,
        tensor: usize,
        operand: &Operand,
        hole: Option<u32>,
        (rank, task, write): (u16, u32, bool),
    ) {
        let entry = &self.graphs[self.owner].tensors[tensor];
        let (graphs, shares) = (self.graphs, self.shares[tensor]);
        // The common case, without a list of boxes.
        if hole.is_none()
            && !graphs.turns(rank.into())
            && let Some(region) = one_region(entry, operand, shares)
        {
            self.found.push((tensor as u32, Access { region, rank, write, task }));
            return;
        }
        let mut add = |operand: &Operand| {
            // "All slots except the rank's own" is treated like all slots on each rank, and the hole has been turned
            // already.
            let found = match hole {
                Some(_) => boxes(entry, operand, shares)?,
                None => graphs.boxes(rank.into(), entry, operand, shares)?,
            };
            self.found.extend(
                found.into_iter().map(|region| (tensor as u32, Access { region, rank, write, task })),
            );
            Ok::<(), Scattered>(())
        };
        let added = match hole {
            None => add(operand),
            Some(hole) => without(operand, entry.dtype.size(), hole).iter().try_for_each(add),
        };
        // The structure has been checked, so no view is scattered.
        debug_assert!(added.is_ok());
    }

    /// Sorts the found accesses by tensor.
    fn sort(&mut self, tensors: usize) {
        for (tensor, _) in &self.found {
            self.offsets[*tensor as usize + 1] += 1;
        }
        for tensor in 0..tensors {
            self.offsets[tensor + 1] += self.offsets[tensor];
        }
        let nothing = Access { region: Region::whole(&[]), rank: 0, write: false, task: 0 };
        let mut next = self.offsets.clone();
        self.accesses = vec![nothing; self.found.len()];
        for (tensor, access) in std::mem::take(&mut self.found) {
            let at = &mut next[tensor as usize];
            self.accesses[*at as usize] = access;
            *at += 1;
        }
    }

    /// The accesses to a tensor.
    pub(super) fn accesses(&self, tensor: usize) -> &[Access] {
        &self.accesses[self.offsets[tensor] as usize..self.offsets[tensor + 1] as usize]
    }

    /// Sorts the accesses to the tensors that other ranks access too.
    pub(super) fn sort_remote(&mut self, mut position: impl FnMut(&Access) -> u32) {
        for tensor in 0..self.remote.len() {
            if self.remote[tensor] {
                let range = self.offsets[tensor] as usize..self.offsets[tensor + 1] as usize;
                self.accesses[range].sort_by_cached_key(|a| (position(a), a.write));
            }
        }
    }

    /// True if tasks of other ranks access the tensor, or a put of this rank does.
    pub(super) fn is_remote(&self, tensor: usize) -> bool {
        self.remote[tensor]
    }

    /// Number of accesses.
    pub(super) fn len(&self) -> usize {
        self.accesses.len()
    }
}
